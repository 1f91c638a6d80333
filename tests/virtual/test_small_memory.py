"""A graph whose features are larger than the memory of its process trains to the loss that it has elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sar.partition.graph_source import GraphSource
from sar.partition.in_memory import divide
from tests.workers import REPOSITORY

NODES, WIDTH, PARTS = 12_000, 2000, 8
LIMIT = 70_000_000
"""Bytes beyond what the imports take."""

SCRIPT = """
import resource, sys, threading
import torch
import sar
from dgl.nn import SAGEConv
from sar.kernels import load_kernels

limit = int(sys.argv[2])
torch.set_num_threads(1)
load_kernels()
torch.optim.SGD([torch.ones(1)])
if limit and not sar.comm.is_initialized():
    threading.stack_size(2**20)  # else stacks count for 8 MB each
    with open("/proc/self/status") as status:
        limit += next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
sar.initialize_comms()
data = sar.load_dgl_partition_data(sys.argv[1], sar.rank(), "cpu")
graph = sar.construct_full_graph(data)
x, label = data.node_features["_N/feat"], data.node_features["_N/label"].float()
del data
torch.manual_seed(0)
model = SAGEConv(x.shape[1], 1, "mean")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
for epoch in range(3):
    optimizer.zero_grad()
    loss = (model(graph, x).squeeze(1) - label).square().sum()
    loss.backward()
    sar.gather_grads(model)
    optimizer.step()
    loss = sar.all_sum(loss.item())
    if sar.rank() == 0:
        print("loss", loss)
"""


def make(folder: Path, nodes: int, width: int) -> None:
    """Write partitions of a random graph, with features of a width, and the script."""
    random = np.random.default_rng(0)
    src, dst = random.integers(0, nodes, (2, 5 * nodes))
    fields = {"feat": random.random((nodes, width), np.float32), "label": random.integers(0, 9, nodes)}
    divide(GraphSource.homogeneous(src, dst, nodes, fields), folder / "parts", "graph", PARTS)
    (folder / "train.py").write_text(SCRIPT)


def train(folder: Path, limit: int, resident: bool) -> tuple[int, list[float], str]:
    """The exit status, losses and errors of a training."""
    virtual = {"SAR_RESIDENT": "1", "SAR_SPILL_DIR": str(folder)} if resident else {}
    done = subprocess.run(
        [sys.executable, str(folder / "train.py"), str(folder / "parts" / "graph.json"), str(limit)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **virtual},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    losses = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("loss")]
    return done.returncode, losses, done.stderr


@pytest.mark.slow
def test_features(tmp_path: Path) -> None:
    make(tmp_path, NODES, WIDTH)
    assert NODES * WIDTH * 4 > LIMIT
    status, losses, told = train(tmp_path, LIMIT, resident=True)
    assert status == 0, told
    status, expected, told = train(tmp_path, 0, resident=False)
    assert status == 0, told
    assert losses == pytest.approx(expected, rel=1e-6)
    status, _, told = train(tmp_path, LIMIT, resident=False)
    assert status != 0
    assert "allocate memory" in told
