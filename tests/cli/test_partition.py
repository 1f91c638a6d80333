"""`sar partition` as it is typed: what it says, what its options mean, and what stops it."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sar.cli import chunk, main
from sar.cli import partition as command
from sar.host.memory import machine_memory
from sar.partition import pipeline
from sar.partition.assign.assignment_files import read_assignment
from sar.partition.inspect.inspection import inspect_directory
from sar.partition.write.write_job import OutputOptions
from tests.python_process import run
from tests.stages import without_stages
from tests.workers import REPOSITORY


@pytest.fixture
def edges(tmp_path: Path) -> Path:
    file = tmp_path / "edges.csv"
    np.savetxt(file, np.random.default_rng(0).integers(0, 50, (300, 2)), "%d", ",")
    return file


def test_it_says_what_it_has_written(tmp_path: Path, edges: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["partition", str(edges), "--parts", "3", "--out", str(tmp_path / "parts"), "--memory-limit", "1GiB"]) == 0
    )
    said, complained = capfd.readouterr()
    report = inspect_directory(tmp_path / "parts")
    assert report.problems == []
    assert report.as_text() in said
    assert f"\nmethod {report.method}\n" in said
    assert said.endswith(f"wrote {tmp_path / 'parts' / 'edges.json'}\n")
    assert without_stages(complained) == ""


@pytest.mark.parametrize("memory, words", [(3_000_000, "1.0 of 3.0 MB"), (6_000, "0.0 of 0.0 MB")])
def test_two_thirds_of_this_machines_memory_are_kept(
    tmp_path: Path,
    edges: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    memory: int,
    words: str,
) -> None:
    """T of SDT-GNN, where nothing is said of it."""
    assert 2**28 < machine_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setattr("sar.cli.partition.machine_memory", lambda: memory)
    assert main(["partition", str(edges), "--parts", "auto", "--workers", "2", "--out", str(tmp_path / "parts")]) == 0
    said = capsys.readouterr().out
    assert f"a worker has {words} for them" in said
    assert ("2 parts: 2 workers hold one each" in said) == (memory > 6_000)


def asked_for(monkeypatch: pytest.MonkeyPatch, line: str) -> list[Any]:
    """The input, assignment and output that a command line asks for, before anything is done."""
    asked: list[Any] = []

    def record(*options: Any) -> Any:
        asked.extend(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_partition", record)
    assert main(["partition", *line.split()]) == 130
    return asked[:3]


def test_what_options_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = "x:r:y=dir/r.csv y:s:y=s*.csv --parts 8 --out parts --num-nodes x=4 --num-nodes y=5 --format text"
    more = "--balance train_mask in_edges --columns a 1 --add-self-loops --no-header --undirected --seed 3 --num-hops 2"
    more += " --remove-self-loops --delimiter ; --allow-nan --imbalance 0.2 --split 0.5,0.25,0.25 --order ids"
    fields = "--node-feature x/feat=f.npy --edge-feature w=w.parquet#a,b --memory-limit 1.5MB --assignment given"
    fields += " --train-nodes x=t.txt --val-nodes x=v.npy --test-nodes x=w.csv#id --ids map"
    source, assigning, output = asked_for(monkeypatch, f"{typed} {more} {fields}")
    assert source.args == ({"x:r:y": "dir/r.csv", "y:s:y": "s*.csv"},)
    assert source.keywords == source.keywords | {
        "cleaning": {"undirected": True, "remove_duplicates": False, "self_loops": "add"},
        "num_nodes": {"x": 4, "y": 5}, "columns": ("a", "1"), "header": False, "seed": 3, "memory": 1_500_000,
        "node_features": {"x/feat": "f.npy"}, "edge_features": {"w": "w.parquet#a,b"}, "ids": "map",
        "train_nodes": {"x": "t.txt"}, "val_nodes": {"x": "v.npy"}, "test_nodes": {"x": "w.csv#id"},
        "format": "text", "delimiter": ";", "allow_nan": True, "split": (0.5, 0.25, 0.25),
    }  # fmt: skip
    assert (assigning.parts, assigning.method, assigning.seed, assigning.imbalance) == (8, "multilevel", 3, 0.2)
    assert (assigning.balance, assigning.assignment) == (("train_mask", "in_edges"), Path("given"))
    assert assigning.order == "ids"
    assert output == OutputOptions(Path("parts"), "r", 1_500_000, 2)
    source, assigning, output = asked_for(monkeypatch, "a.txt b.txt --parts 2 --out p --header --remove-duplicates")
    assert (source.args, output.name, assigning.order) == ((["a.txt", "b.txt"],), "a", "clusters")
    assert source.keywords["cleaning"] == {"undirected": False, "remove_duplicates": True, "self_loops": "keep"}
    assert (source.keywords["header"], source.keywords["format"], source.keywords["split"]) == (True, None, None)


def test_an_assignment_alone(tmp_path: Path, edges: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--parts", "3", "--method", "random", "--assign-only", "--write-assignment", str(tmp_path / "assigned")]
    assert main(["partition", str(edges), *options]) == 0
    assert capsys.readouterr().out == f"method random\nwrote {tmp_path / 'assigned'}\n"
    found = read_assignment(tmp_path / "assigned", {"_N": 50}, 3)
    assert found.algo_name == "random"
    assert set(found.parts.tolist()) == {0, 1, 2}
    assert sorted(os.listdir(tmp_path)) == ["assigned", "edges.csv"]


@pytest.mark.parametrize("name", ["partition", "chunk"])
def test_a_stopped_run_cleans_up(tmp_path: Path, edges: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def stop(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(pipeline, "write_parts", stop)
    monkeypatch.setattr(chunk, "write_chunks", stop)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as raised:
        main([name, str(edges), *(["--parts", "2"] if name == "partition" else []), "--out", str(tmp_path / "parts")])
    assert raised.value.code == 128 + signal.SIGTERM
    assert os.listdir(tmp_path) == ["edges.csv"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_one_of_several_processes_writes(tmp_path: Path, edges: Path) -> None:
    """Under a launcher the others stop, and say why; nothing is half written."""
    options = [str(edges), "--parts", "3", "--method", "random", "--out", tmp_path / "parts"]
    start = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2", "-m", "sar.cli"]
    environment = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = run("-m", *start, "partition", *options, env=environment, timeout=120)
    assert done.returncode == 1
    assert "start it once, without torchrun" in done.stderr or "already holds" in done.stderr
    assert not (tmp_path / "parts.partial").exists()
    assert not (tmp_path / "parts").exists() or inspect_directory(tmp_path / "parts").problems == []
