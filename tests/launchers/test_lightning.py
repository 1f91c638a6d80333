"""The script of docs/howto/cluster.md, with two workers and one: its losses are those of DGL on one machine."""

import csv
import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from dgl.nn import GATConv
from torch.nn import functional

from tests.launchers.training import output_of
from tests.pages.blocks import runs_of
from tests.pages.files import graph as write_partitions
from tests.pages.files import small_graph
from tests.workers import REPOSITORY

PAGE = REPOSITORY / "docs" / "howto" / "cluster.md"


def losses_on_one_machine(epochs: int) -> list[float]:
    graph = small_graph()
    x, labels, train = (graph.ndata[name] for name in ("feat", "label", "train_mask"))
    torch.manual_seed(0)
    first, last = GATConv(x.shape[1], 8, 2), GATConv(16, int(labels.max()) + 1, 1)
    optimizer = torch.optim.Adam([*first.parameters(), *last.parameters()], lr=0.01)
    losses = []
    for _ in range(epochs):
        logits = last(graph, first(graph, x).flatten(1).relu()).squeeze(1)
        loss = functional.cross_entropy(logits[train], labels[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="there is no lightning: pip install 'sar-gnn[lightning]'"
)
def test_the_page_trains_as_one_machine(tmp_path: Path) -> None:
    write_partitions(tmp_path)
    blocks = [block for run in runs_of(PAGE, PAGE.read_text()) for block in run.blocks]
    [script] = [block.code for block in blocks if block.title == "train.py"]
    [command] = [block.code.split() for block in blocks if block.code.startswith("torchrun")]
    (tmp_path / "train.py").write_text(script)
    own = {"PYTHONPATH": str(REPOSITORY), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    for start, version in ([sys.executable, command[-1]], 0), ([*torchrun, *command[1:]], 1):
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        output_of(start, tmp_path, os.environ | own, limit=200)
        [log] = (tmp_path / "logs").rglob(f"version_{version}/metrics.csv")  # one, so worker 0's
        rows = list(csv.DictReader(log.read_text().splitlines()))
        losses = [float(row["loss"]) for row in rows if row["loss"]]
        assert len(losses) > 20
        torch.testing.assert_close(losses, losses_on_one_machine(len(losses)), rtol=1e-5, atol=1e-6)
    assert len(list((tmp_path / "logs").rglob("metrics.csv"))) == 2
    [test] = [float(row["test"]) for row in rows if row["test"]]
    best = max(float(row["val"]) for row in rows if row["val"])
    assert min(test, best) > 0.6
    [checkpoint] = (tmp_path / "checkpoints").iterdir()
    assert re.fullmatch(r"epoch=\d+-step=\d+\.ckpt", checkpoint.name)
    assert set(torch.load(checkpoint, weights_only=True)["state_dict"]) == {
        f"{layer}.{name}" for layer in ("first", "last") for name, _ in GATConv(2, 2, 1).named_parameters()
    }
