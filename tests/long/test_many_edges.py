"""Fifty million edges on one machine: partitioned out of core in the memory given, and trained on for an epoch."""

import shutil
import subprocess
import sys
from pathlib import Path

import dgl.nn
import numpy as np
import pytest
import torch

import sar
from tests.long.usage import MIB
from tests.workers import REPOSITORY, WorkerPool

NODES, EDGES, WIDTH = 4_000_000, 50_000_000, 8
DISK, FREE = 8_000 * MIB, 6_000 * MIB
"""What the files take at most, and what two workers with DGL, the graph and its layers do."""
MEMORY, PYTHON = 256 * MIB, 350 * MIB
"""What `sar partition` is given, and what the process takes before, with its libraries."""
CHUNK = 5_000_000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def write_input(folder: Path) -> None:
    """Edges with hubs, and a feature of nodes."""
    random = np.random.default_rng(0)
    pairs = np.lib.format.open_memmap(folder / "edges.npy", "w+", np.int32, (EDGES, 2))
    for start in range(0, EDGES, CHUNK):
        pairs[start : start + CHUNK] = NODES * random.random((CHUNK, 2)) ** 2
    pairs.flush()
    features = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (NODES, WIDTH))
    for start in range(0, NODES, CHUNK // WIDTH):
        features[start : start + CHUNK // WIDTH] = np.arange(start, min(start + CHUNK // WIDTH, NODES))[:, None] % 97
    features.flush()


PARTITION = """
import sys
from sar.cli import main
status = main(sys.argv[1:])
print(*(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(status)
"""
"""Prints its own peak, because what the system says of a child begins with the peak of its parent."""


def partition(folder: Path) -> int:
    """Run `sar partition` in a process of its own, and return its peak resident memory in bytes."""
    command = [sys.executable, "-c", PARTITION, "partition", str(folder / "edges.npy")]
    options = ["--num-nodes", str(NODES), "--parts", "2", "--method", "ldg", "--memory-limit", f"{MEMORY // MIB}MiB"]
    places = ["--node-feature", f"x={folder / 'x.npy'}", "--out", str(folder / "parts")]
    done = subprocess.run(
        [*command, *options, *places], cwd=REPOSITORY, timeout=900, check=True, stdout=subprocess.PIPE, text=True
    )
    return int(done.stdout.splitlines()[-1]) * 1024


def one_epoch(rank: int, json_file: str) -> tuple[int, float, float]:
    """Edges here, the sum of all means of features over in-neighbours, and the largest gradient."""
    data = sar.load_dgl_partition_data(json_file, rank, "cpu")
    x = sar.suffix_key_lookup(data.node_features, "x")
    graph = sar.construct_full_graph(data)
    del data
    layer = dgl.nn.SAGEConv(WIDTH, WIDTH, "mean")
    sar.sync_params(layer)
    loss = layer(graph, x).square().sum() / NODES
    loss.backward()
    sar.gather_grads(layer)
    return graph.num_edges(), float(loss), max(float(p.grad.abs().max()) for p in layer.parameters())


def available_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def test_fifty_million_edges(tmp_path):
    if shutil.disk_usage(tmp_path).free < DISK or available_memory() < FREE:
        pytest.skip(f"needs {DISK // MIB} MiB of disk and {FREE // MIB} MiB of memory")
    try:
        write_input(tmp_path)
        peak = partition(tmp_path)
        print(f"peak memory of sar partition: {peak / MIB:.0f} MiB")
        assert peak < MEMORY + PYTHON
        pool = WorkerPool(2)
        try:
            results = pool.run(one_epoch, str(tmp_path / "parts" / "edges.json"), per_rank=[0, 1], timeout=600)
        finally:
            pool.close()
        assert sum(edges for edges, _, _ in results) == EDGES
        assert all(np.isfinite(loss) and 0 < gradient < torch.inf for _, loss, gradient in results)
    finally:
        shutil.rmtree(tmp_path)
