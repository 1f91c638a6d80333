"""Processes that write together: where one is killed or raises, in any phase, the others end and nothing is lost."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
from torch.distributed import TCPStore

import sar
from sar.cli import main
from sar.partition import pipeline
from sar.partition.write import write
from sar.partition.write.divide import EdgeBuckets
from sar.partition.write.staging import Staging
from tests.partition.written import content_of
from tests.workers import REPOSITORY, Err

PHASES: dict[str, tuple[object, str, int]] = {  # what fails, and on which process
    "reading": (pipeline, "open_input", 1),
    "assigning": (pipeline, "assign", 0),
    "dividing edges": (EdgeBuckets, "_divide", 1),
    "dividing fields": (write, "write_node_fields", 1),
    "part graphs": (write, "write_part_graph", 1),
    "checksums": (write, "write_sums", 0),
    "moving": (Staging, "_finish", 0),
}


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(*_: Any, **__: Any) -> None:
    raise MemoryError("none is left")


def partition(folder: Path, phase: str, rank: int, what: Callable[..., None]) -> int:
    """Run `sar partition`; process `rank` of those that do fails in a phase."""
    edges, features = folder / "edges.csv", f"feat={folder}/feat.npy"
    options = ["--parts", "3", "--method", "random", "--resume", "--node-feature", features, "--name", "graph"]
    with pytest.MonkeyPatch.context() as patch:
        if phase and PHASES[phase][2] == rank:
            patch.setattr(*PHASES[phase][:2], what)
        return main(["partition", str(edges), *options, "--out", str(folder / "parts")])


def write_input(folder: Path) -> None:
    rng = np.random.default_rng(0)
    np.savetxt(folder / "edges.csv", rng.integers(0, 40, (150, 2)), "%d", ",")
    np.save(folder / "feat.npy", rng.random((40, 3)))


def start(folder: Path, phase: str) -> list[subprocess.Popen[str]]:
    """Two processes, as a launcher starts them; one is killed in a phase."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    shared |= {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "TORCHELASTIC_RESTART_COUNT": 0, "GLOO_SOCKET_IFNAME": "lo"}
    started = []
    for rank in range(2):
        environment = {name: str(value) for name, value in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        call = "import sys, pathlib as p, tests.partition.test_team_failures as t; "
        call += f"sys.exit(t.partition(p.Path({str(folder)!r}), {phase!r}, {rank}, t.die))"
        command = [sys.executable, "-W", "ignore", "-c", call]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(
            subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | environment, text=True, **pipes)  # type: ignore[call-overload]
        )
    started[0].store = store  # as long as the processes
    return started


def ended(started: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit status and last words of each; all end within 60 s of the first, which takes at most 120 s."""
    limit = time.monotonic() + 120
    try:
        while all(process.poll() is None for process in started) and time.monotonic() < limit:
            time.sleep(0.1)
        return [(process.returncode, said[1]) for process in started for said in [process.communicate(timeout=60)]]
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_where_one_is_killed_the_others_end_and_the_run_resumes(tmp_path: Path, phase: str) -> None:
    write_input(tmp_path)
    dead = PHASES[phase][2]
    found = ended(start(tmp_path, phase))
    assert found[dead][0] == -signal.SIGKILL
    status, said = found[1 - dead]
    assert status == 1, said
    assert "its process died" in said, said
    assert f"worker {dead}: no answer" in said, said
    assert sorted(os.listdir(tmp_path)) == ["edges.csv", "feat.npy", "parts.partial"]
    assert [status for status, _ in ended(start(tmp_path, ""))] == [0, 0]
    assert sorted(os.listdir(tmp_path)) == ["edges.csv", "feat.npy", "parts"]
    together = content_of(tmp_path / "parts")
    (tmp_path / "parts").rename(tmp_path / "together")
    assert partition(tmp_path, "", 0, die) == 0
    assert content_of(tmp_path / "parts") == together


def partition_here(folder: Path, phase: str) -> None:
    options = (
        pipeline.InputOptions(str(folder / "edges.csv"), node_features={"feat": str(folder / "feat.npy")}),
        pipeline.AssigningOptions(3, "random"),
        pipeline.OutputOptions(folder / "parts", name="graph"),
    )
    with pytest.MonkeyPatch.context() as patch:
        if phase and PHASES[phase][2] == sar.rank():
            patch.setattr(*PHASES[phase][:2], fail)
        pipeline.run_partition(*options)


def partition_on_one(folder: Path, then: str) -> None:
    """What only worker 0 should not call; the others go on to another call."""
    graph = dgl.graph(([0, 1, 2], [1, 2, 3]))
    if sar.rank() == 0 and then == "partition_graph":
        sar.partition_graph(graph, "g", 2, folder / "parts")
    elif sar.rank() == 0:
        sar.write_partitions(graph, np.zeros(4, int), 1, folder / "parts", "g", method="own")
    sar.all_sum(1)


@pytest.mark.parametrize("call", ["partition_graph", "write_partitions"])
@pytest.mark.parametrize("world_size", [2])
def test_a_graph_is_divided_by_all_workers(pool: Any, world_size: int, call: str, tmp_path: Path) -> None:
    for outcome in pool.outcomes(partition_on_one, tmp_path, call):
        assert outcome.kind == "DisagreementError"
        assert f"sar.{call}" in outcome.message
        assert "which all workers" in outcome.message
    assert not list(tmp_path.iterdir())


@pytest.mark.processes("one worker's module is patched")
@pytest.mark.parametrize("world_size", [2])
def test_where_one_raises_all_end_and_nothing_is_left(pool, tmp_path):
    write_input(tmp_path)
    for phase, (_, _, culprit) in PHASES.items():
        outcomes = pool.outcomes(partition_here, tmp_path, phase)
        assert all(isinstance(outcome, Err) for outcome in outcomes), phase
        assert outcomes[culprit].kind == "MemoryError"
        assert outcomes[1 - culprit].kind == "PeerError", (phase, outcomes[1 - culprit])
        assert f"Worker {culprit} raised MemoryError: none is left" in outcomes[1 - culprit].message
        left = [str(path) for path in tmp_path.rglob("*")]
        assert sorted(os.listdir(tmp_path)) == ["edges.csv", "feat.npy"], (phase, left)
    pool.run(partition_here, tmp_path, "")
    assert "parts" in os.listdir(tmp_path)
