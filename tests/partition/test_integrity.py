"""Written directories are on the disk before they have their names, damage to them is told, and kills lose nothing."""

import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import sar
from sar.cli import main
from sar.data.checksums import SUMS
from sar.errors import PartitionError
from sar.partition.graph_source import ArrayEdges, GraphSource
from sar.partition.inspect.inspection import inspect_directory
from sar.partition.write.write import write_partitions
from tests.partition.written import content_of, typed_graph, write
from tests.python_process import run

PAGE = 4096


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Two parts, whose files have several pages, in which no byte is zero by chance."""
    rng = np.random.default_rng(0)
    etype = ("_N", "_E", "_N")
    edges = ArrayEdges(rng.integers(0, 300, 4000), rng.integers(0, 300, 4000))
    node_data = {"_N": {"feat": rng.random((300, 500))}}
    graph = GraphSource({"_N": 300}, {etype: edges}, node_data, {etype: {"w": rng.random((4000, 4))}})
    folder = tmp_path_factory.mktemp("pristine") / "parts"
    write_partitions(graph, rng.integers(0, 2, 300), 2, folder, "graph", method="custom")
    return content_of(folder)


@pytest.fixture
def directory(tmp_path: Path, pristine: dict[str, bytes]) -> Path:
    for name, content in pristine.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def zero_page(file: Path, page: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(page * PAGE)
        opened.write(bytes(PAGE))


FILES = ["graph.dgl", "node_feat.dgl", "edge_feat.dgl"]


@pytest.mark.parametrize("name", FILES)
def test_a_page_of_zeros_is_found(directory: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(directory), "--verify"]) == 0
    file = directory / "part1" / name
    page = file.stat().st_size // PAGE // 2
    zero_page(file, page)
    assert main(["inspect", str(directory), "--verify"]) == 1
    said = capsys.readouterr().out
    assert f"{file} is not what was written: its checksum does not match. Copy it again" in said
    assert "part0" not in said.partition("not sound")[2]
    json_file = directory / "graph.json"
    with pytest.raises(PartitionError, match=f"part1/{name} is not what was written: .* Copy it again"):
        sar.load_dgl_partition_data(json_file, 1, "cpu")
    sar.load_dgl_partition_data(json_file, 0, "cpu")


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda part: (part / "orig_nids.dgl").unlink(), "orig_nids.dgl is missing, but"),
        (lambda part: os.truncate(part / "edge_feat.dgl", PAGE), rf"has {PAGE} bytes, but \d+ were written"),
        (lambda part: zero_page(part / SUMS, 0), "holds no checksums that this version of sar knows"),
        (lambda part: (part / SUMS).write_text("[]"), "holds no checksums that this version of sar knows"),
        (lambda part: (part / SUMS).write_text('{"kind": "MD5", "files": {}}'), "expected the CRC-32"),
        (lambda part: (part / SUMS).unlink(), f"has no {SUMS}: there are no checksums to verify"),
    ],
)
def test_other_damage(directory: Path, damage: Callable[[Path], None], words: str) -> None:
    assert inspect_directory(directory, verify=True).problems == []
    damage(directory / "part1")
    problems = inspect_directory(directory, verify=True).problems
    assert len(problems) >= 1
    assert any(re.search(words, problem) for problem in problems)
    if words.startswith("has no"):
        assert inspect_directory(directory).problems == []


def test_everything_is_on_the_disk_before_the_directory_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    target = tmp_path / "parts"

    def record(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append(str(path.relative_to(tmp_path)))
        assert target.exists() == (path == tmp_path)

    monkeypatch.setattr(os, "fsync", record)
    write(typed_graph(), target)
    written = [path.relative_to(target) for path in (target, *target.rglob("*"))]
    assert {f"parts.partial/new/{path}" for path in written} - {"parts.partial/new/."} <= {*synced}
    assert synced[-2:] == ["parts.partial/new", "."]


def test_only_damage_that_the_sums_tell_is_refused_and_only_where_they_are_asked(directory: Path) -> None:
    """Zeros in features are what nobody else can tell from features."""
    zero_page(directory / "part0" / "node_feat.dgl", 20)
    load = partial(sar.load_dgl_partition_data, directory / "graph.json", 0, "cpu")
    with pytest.raises(PartitionError, match=r"node_feat\.dgl is not what was written"):
        load()
    damaged = load(verify=False).node_features["_N/feat"]
    (directory / "part0" / SUMS).unlink()
    assert torch.equal(load().node_features["_N/feat"], damaged)
    assert int((damaged == 0).sum()) >= PAGE // 8 - 1


# -- kills

WATCHED = {"open", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree"}


def killed_at_every_change(folder: Path, from_last_step: bool) -> None:
    """Kill a run before one change of files after the other, look at what is there, and run again."""
    rng, parts = np.random.default_rng(0), folder / "parts"
    np.savetxt(folder / "edges.csv", rng.integers(0, 40, (150, 2)), "%d", ",")
    np.save(folder / "feat.npy", rng.random((40, 3)))
    command = ["partition", str(folder / "edges.csv"), "--parts", "2", "--method", "random", "--undirected"]
    command += [f"--node-feature=feat={folder}/feat.npy", "--out", str(parts)]
    assert main(command) == 0
    whole = content_of(parts)
    for point in range(1000):
        shutil.rmtree(parts)
        child = os.fork()
        if child == 0:
            kill_at(point, str(parts), from_last_step)
            os._exit(main(command))
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert content_of(parts) in ({}, whole), point
        if not parts.exists():
            assert main(command) == 0
            assert sorted(os.listdir(folder)) == ["edges.csv", "feat.npy", "parts"], point
        assert content_of(parts) == whole
        shutil.rmtree(folder / "parts.partial", ignore_errors=True)
    assert status == 0
    assert point > 2


def kill_at(point: int, where: str, from_last_step: bool) -> None:
    """Arrange for this process to be killed before its `point`-th change of files, of all or of those at the end."""
    counted, begun = 0, not from_last_step

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal counted, begun
        if event not in WATCHED or not str(arguments[0]).startswith(where):
            return
        begun = begun or (event == "os.rename" and str(arguments[0]) == f"{where}.partial/new")
        counted += begun
        if counted > point:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


@pytest.mark.parametrize("from_last_step", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_killed_anywhere_leaves_the_whole_directory_or_none(tmp_path: Path, from_last_step: bool) -> None:
    arguments = f"p.Path({str(tmp_path)!r}), {from_last_step}"
    call = f"import pathlib as p, tests.partition.test_integrity as t; t.killed_at_every_change({arguments})"
    done = run("-c", call, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
