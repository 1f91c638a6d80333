"""`sar inspect`, run as a user runs it."""

import json
from pathlib import Path

import pytest
from matplotlib.image import imread

from sar import id_slices, load_dgl_partition_data
from sar.cli import main
from sar.data.regroup import regroup
from tests.adapters.dgl.directories import heterogeneous_graph, write_directory


@pytest.fixture
def directory(tmp_path: Path, capsys):
    made = write_directory(tmp_path / "parts", heterogeneous_graph(), 2)
    capsys.readouterr()  # DGL prints
    return made


def test_a_sound_directory(directory, tmp_path: Path, capsys) -> None:
    assert main(["inspect", str(tmp_path / "parts"), "--values", "--picture", str(tmp_path / "traffic.png")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("graph: 82 nodes, 440 edges in 2 parts\n")
    assert "paper:cites:paper    edges     120" in said
    assert "\nsound\n(structure only: --verify" in said
    assert imread(tmp_path / "traffic.png").shape[2] == 4


def test_one_object_for_machines(directory, capsys) -> None:
    assert main(["inspect", str(directory.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    assert found["num_nodes"] == {"author": 30, "paper": 40, "venue": 12}
    assert sum(map(sum, found["traffic"])) == sum(found["halo"])


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_other_numbers_of_workers(directory, capsys, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each would hold and exchange is what regrouped partitions have; with one for each part, what parts have."""
    monkeypatch.setattr(id_slices.pieces, "__defaults__", (7,))
    options = ["inspect", str(directory.path), "--workers", str(workers)]
    assert main([*options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    on_workers = found["workers"]
    assert main(options) == 0
    rows = capsys.readouterr().out.partition("worker: parts")[2].splitlines()[2 : 2 + workers]
    shares = on_workers["shares"]
    ranges = [(share["start"], share["end"]) for share in shares]
    for worker, row in enumerate(rows):
        parts = {part: load_dgl_partition_data(directory.path, part, "cpu") for part in shares[worker]["parts"]}
        shards = [shard.edges[0] for shard in regroup(parts, ranges, worker).all_shard_edges]
        read = [0 if other == worker else len(src.unique()) for other, src in enumerate(shards)]
        assert [sent[worker] for sent in on_workers["traffic"]] == read
        edges = sum(map(len, shards))
        held = [ranges[worker][1] - ranges[worker][0], sum(read), edges, edges - len(shards[worker])]
        assert [int(cell) for cell in row.split()[2:6]] == held
    if workers == 2:
        assert all(on_workers[figure] == found[figure] for figure in on_workers if figure != "shares")


def test_files_outside_are_read_on_request(directory, tmp_path: Path, capsys) -> None:
    file = directory.file(1, "edge_feats")
    file.rename(tmp_path / "elsewhere.dgl")
    file.symlink_to(tmp_path / "elsewhere.dgl")
    options = ["inspect", str(directory.path), "--workers", "3"]
    assert main(options) == 1
    assert "--allow-outside" in capsys.readouterr().err
    assert main([*options, "--allow-outside"]) == 0


def test_no_workers_are_refused(directory, capsys) -> None:
    assert main(["inspect", str(directory.path), "--workers", "0"]) == 1
    assert "0 workers were asked for; expected at least 1" in capsys.readouterr().err


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
