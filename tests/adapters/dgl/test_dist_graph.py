"""`convert_dist_graph` against the graph that was partitioned, in clusters on this machine and standalone."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sar
from sar.adapters.dgl.dist_graph import _runs, _Served
from tests.adapters.dgl import dist_graph_trainer as trainer
from tests.adapters.dgl.directories import Directory, dgl, insert_empty_partition, to_dgl_09, write_directory
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


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[subprocess.Popen[str], Path, Any]]]:
    """A cluster for each graph, started side by side: they mostly sleep."""
    started = {}
    for name, make in GRAPHS.items():
        folder = tmp_path_factory.mktemp(name)
        directory = write_directory(folder / "parts", make(), MACHINES)
        command = [sys.executable, "examples/distdgl_cluster.py", "--time-limit", "120"]
        command += ["--partition-json", str(directory.path), trainer.__file__, str(folder)]
        environment = {**__import__("os").environ, "PYTHONPATH": str(REPOSITORY)}
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        started[name] = process, folder, directory.graph
    yield started
    for process, *_ in started.values():
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize("name", GRAPHS)
def test_cluster(name: str, clusters: dict[str, tuple[subprocess.Popen[str], Path, Any]]) -> None:
    process, folder, graph = clusters[name]
    said, _ = process.communicate(timeout=150)
    assert process.returncode == 0, said
    check(graph, [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(MACHINES)])
