"""The loop to copy, run as its first lines say, against the same training in one process of plain DGL."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from dgl.nn import SAGEConv
from torch.nn import functional

from sar.common_tuples import SPLIT
from tests.examples.scripts import TORCHRUN, generated, partition, run
from tests.matrix import corner


def training_of_one_process(graph: Any, epochs: int) -> tuple[list[float], float]:
    """The example's losses on the whole graph with DGL's own graph, and the test accuracy of the best epoch."""
    x, labels, train, val, test = (graph.ndata[key] for key in ("feat", "label", *SPLIT))
    torch.manual_seed(0)
    first = SAGEConv(x.shape[1], 64, "mean")
    last = SAGEConv(64, int(labels.max()) + 1, "mean")
    optimizer = torch.optim.Adam([*first.parameters(), *last.parameters()], lr=0.01)
    losses, accuracies = [], []
    for _ in range(epochs + 1):  # the last one's logits are those after the epochs
        logits = last(graph, functional.relu(first(graph, x)))
        right = (logits.argmax(1) == labels).double()
        accuracies.append((right[val].mean().item(), right[test].mean().item()))
        loss = functional.cross_entropy(logits[train], labels[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[:-1], max(accuracies[1:], key=lambda of_epoch: of_epoch[0])[1]  # of equal ones the first


@pytest.mark.parametrize("workers", [2, corner(3)])
def test_partition_then_train(tmp_path: Path, workers: int) -> None:
    graph = generated()
    options = partition(graph, tmp_path, workers)
    said = run(*TORCHRUN, str(workers), "examples/full_graph.py", *options, "--epochs", "20")
    epoch = re.compile(r"^epoch \d+: loss ([\d.]+), validation accuracy [\d.]+$", re.MULTILINE)
    losses = [float(loss) for loss in epoch.findall(said)]
    expected_losses, expected_accuracy = training_of_one_process(graph, 20)
    assert losses == pytest.approx(expected_losses, abs=1e-4)
    assert losses[-1] < 0.5 * losses[0]
    [accuracy] = re.findall(r"^test accuracy ([\d.]+)$", said, re.MULTILINE)
    assert float(accuracy) == pytest.approx(expected_accuracy, abs=1e-4)
    assert float(accuracy) > 0.6  # of the best epoch by validation, which is not the best one by test


@pytest.mark.slow
def test_a_generated_graph_and_a_random_split(tmp_path: Path) -> None:
    run("examples/partition_graph.py", "--out", str(tmp_path / "cora"))
    options = "--partition-json", str(tmp_path / "cora"), "--epochs", "30"
    said = run(*TORCHRUN, "2", "examples/full_graph.py", *options)
    [accuracy] = re.findall(r"^test accuracy ([\d.]+)$", said, re.MULTILINE)
    assert float(accuracy) > 0.5  # 0.14 by chance
