"""`convert_dist_graph` against the graph that was partitioned, in clusters on this machine and standalone."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sar
from tests.adapters.dgl import dist_graph_trainer as trainer
from tests.adapters.dgl.directories import dgl, write_directory
from tests.workers import REPOSITORY, Err, WorkerPool

GRAPHS = {"homogeneous": trainer.homogeneous_graph, "heterogeneous": trainer.heterogeneous_graph}
MACHINES = 2


def check(graph: Any, by_rank: list[tuple[list[tuple[int, int]], Any]]) -> None:
    """Compare fields, outputs and gradients of all workers with those of the graph in one process."""
    expected = trainer.evaluate(graph)
    assert len({tuple(ranges) for ranges, _ in by_rank}) == 1
    found = [results for _, results in by_rank]
    for kind in ("nodes", "edges"):
        for name, columns in expected[kind].items():
            numbers = torch.cat([results[kind][name]["number"] for results in found])
            assert numbers.sort().values.equal(torch.arange(len(numbers)))
            for field, values in columns.items():
                rows = torch.cat([results[kind][name][field] for results in found])
                values = values.to(torch.uint8) if values.dtype == torch.bool else values  # as DGL writes it
                assert rows.dtype == values.dtype
                torch.testing.assert_close(rows, values[numbers], rtol=1e-9, atol=1e-9)
            ids = torch.cat([results[kind][name]["_ID"] for results in found])
            assert len(ids.unique()) == len(numbers)
    for rank, (ranges, results) in enumerate(by_rank):
        ids = torch.cat([columns["_ID"] for columns in results["nodes"].values()])
        assert ids.sort().values.equal(torch.arange(*ranges[rank]))
        for name, gradient in expected["parameters"]["grad"].items():
            torch.testing.assert_close(results["parameters"]["grad"][name], gradient, rtol=1e-9, atol=1e-9)


def start_cluster(folder: Path, file: Path) -> subprocess.Popen[str]:
    """Start servers, and trainers that leave their results in `folder`."""
    command = [sys.executable, "examples/distdgl_cluster.py", "--time-limit", "120"]
    command += ["--partition-json", str(file), trainer.__file__, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=REPOSITORY, env=environment, text=True, **pipes)


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["dgl", "sar"])
@pytest.mark.parametrize("name", GRAPHS)
def test_cluster(tmp_path: Path, name: str, writer: str) -> None:
    graph, file = GRAPHS[name](), tmp_path / "parts" / "graph.json"
    if writer == "dgl":
        graph = write_directory(tmp_path / "parts", graph, MACHINES).graph
    else:
        sar.partition_graph(graph, "graph", MACHINES, tmp_path / "parts", num_hops=2)
    process = start_cluster(tmp_path, file)
    try:
        said, _ = process.communicate(timeout=150)
    finally:
        process.terminate()
        process.wait(timeout=30)
    assert process.returncode == 0, said
    check(graph, [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(MACHINES)])


@contextlib.contextmanager
def standalone(file: Path) -> Iterator[Any]:
    """A `DistGraph` without servers."""
    dgl.distributed.initialize("")
    try:
        yield dgl.distributed.DistGraph("graph", part_config=str(file))
    finally:
        dgl.distributed.exit_client()


def convert(file: Path) -> tuple[list[tuple[int, int]], Any]:
    with standalone(file) as dist_graph:
        graph = sar.convert_dist_graph(dist_graph)
        return graph.node_ranges, trainer.evaluate(graph)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", GRAPHS)
def test_trainers_of_one_partition_share_it(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    directory = write_directory(tmp_path, GRAPHS[name](), 1)
    check(directory.graph, pool.run(convert, directory.path))


@pytest.mark.parametrize("world_size", [2])
def test_the_first_share_may_have_the_last_edges(pool: WorkerPool, tmp_path: Path) -> None:
    src, dst = torch.arange(30) % 10, torch.arange(30) // 3
    graph = dgl.heterograph({("a", "r", "b"): (src, dst), ("b", "s", "a"): (src, dst)})
    trainer.with_fields(graph, torch.Generator())
    found = pool.run(convert, write_directory(tmp_path, graph, 1).path)
    check(graph, found)
    assert [results["edges"]["a:r:b"]["_ID"].tolist() for _, results in found] == [[], list(range(30))]


def edges_by_rank(file: Path) -> int:
    with standalone(file) as dist_graph:
        return sar.convert_dist_graph(dist_graph).num_edges()


@pytest.mark.parametrize("world_size", [2])
def test_shares_are_balanced_by_edges(pool: WorkerPool, tmp_path: Path) -> None:
    nodes = torch.arange(100)
    graph = dgl.graph((nodes.repeat(10), nodes[:10].repeat_interleave(100)))
    assert pool.run(edges_by_rank, write_directory(tmp_path, graph, 1).path) == [500, 500]


@pytest.mark.parametrize("world_size", [2])
def test_more_trainers_than_nodes(pool: WorkerPool, tmp_path: Path) -> None:
    graph = trainer.with_fields(dgl.graph(([0, 0], [0, 0])), torch.Generator())
    check(graph, pool.run(convert, write_directory(tmp_path, graph, 1).path))


def convert_mixed(parts: tuple[int, int], file: Path, one: Path) -> None:
    """Convert a `DistGraph` with the graph of one partition and the partition book of another."""
    with standalone(one) as dist_graph:
        dist_graph._g = dgl.distributed.load_partition(str(file), parts[0])[0]
        dist_graph._gpb = dgl.distributed.load_partition(str(file), parts[1])[3]
        sar.convert_dist_graph(dist_graph)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize(
    "parts, message",
    [
        ([(1, 1), (0, 0)], r"hold the partitions \[1, 0\], by rank; expected all of 0 to 1, ascending"),
        ([(0, 0), (0, 0)], r"hold the partitions \[0, 0\]"),
        ([(0, 0), (0, 1)], "does not fit its partition book; expected, for partition 1"),
    ],
    ids=["other order", "partition without trainer", "another server's memory"],
)
def test_partitions_must_fit_the_ranks(
    pool: WorkerPool, tmp_path: Path, parts: list[tuple[int, int]], message: str
) -> None:
    graph = trainer.homogeneous_graph()
    two, one = (write_directory(tmp_path / str(count), graph, count).path for count in (2, 1))
    outcomes = pool.outcomes(convert_mixed, two, one, per_rank=parts)
    assert all(isinstance(outcome, Err) for outcome in outcomes)
    assert any(outcome.is_a("PartitionError") and re.search(message, outcome.message) for outcome in outcomes)


def convert_wrong(file: Path) -> list[str]:
    messages = []
    with standalone(file) as dist_graph:
        dist_graph._g = None
        for wrong in (dist_graph, dgl.graph(([0], [1]))):
            with pytest.raises(sar.SarError) as caught:
                sar.convert_dist_graph(wrong)
            messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("world_size", [1])
def test_what_cannot_be_converted(pool: WorkerPool, tmp_path: Path) -> None:
    [[remote, other]] = pool.run(convert_wrong, write_directory(tmp_path, trainer.homogeneous_graph(), 1).path)
    assert "Start the trainers on the servers' machines" in remote
    assert "was given a DGLGraph" in other
