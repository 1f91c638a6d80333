"""`sar inspect`, run as a user runs it."""

import json
from pathlib import Path

import pytest

from sar.cli import main
from tests.adapters.dgl.directories import heterogeneous_graph, write_directory


@pytest.fixture
def directory(tmp_path: Path, capsys):
    made = write_directory(tmp_path / "parts", heterogeneous_graph(), 2)
    capsys.readouterr()  # DGL prints
    return made


def test_a_sound_directory(directory, tmp_path: Path, capsys) -> None:
    assert main(["inspect", str(tmp_path / "parts")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("graph: 82 nodes, 440 edges in 2 parts\n")
    assert "paper:cites:paper 120" in said
    assert "\nsound\n(structure only: --verify" in said


def test_one_object_for_machines(directory, capsys) -> None:
    assert main(["inspect", str(directory.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    assert found["num_nodes"] == {"author": 30, "paper": 40, "venue": 12}
    assert sum(map(sum, found["traffic"])) == sum(found["halo"])


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_damage_ends_in_status_1(directory, capsys, arguments: list[str]) -> None:
    directory.file(1, "edge_feats").unlink()
    assert main(["inspect", str(directory.path), *arguments]) == 1
    said = capsys.readouterr().out
    problems = json.loads(said)["problems"] if arguments else said.partition("not sound:\n")[2].splitlines()
    assert len(problems) == 4  # the file, and each of the three features that part 0 has
    assert all("part1/edge_feat.dgl" in problem for problem in problems)


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_broken_json_file_ends_in_status_1(directory, capsys, arguments: list[str]) -> None:
    directory.path.write_text("{")
    assert main(["inspect", str(directory.path), *arguments]) == 1
    said = capsys.readouterr()
    message = json.loads(said.out)["problems"][0] if arguments else said.err
    assert "graph.json is not valid JSON" in message


@pytest.mark.parametrize(
    "arguments, instead", [(["inspect", "x", "--picture=a.png"], "--json"), (["examples", "x"], "examples/ of")]
)
def test_what_was_removed_says_what_to_do_instead(capsys, arguments: list[str], instead: str) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "was removed" in said
    assert instead in said
