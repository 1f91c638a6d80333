"""The examples, run as their first lines say, against the same training in one process of plain DGL."""

import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from sar.adapters.dgl.models import dgl_graph
from sar.adapters.dgl.shim import require_dgl
from sar.common_tuples import SPLIT
from sar.partition.ingest.chunked import write_chunked
from tests.examples.scripts import TORCHRUN, generated, in_memory, partition, run
from tests.graphs import DATA
from tests.matrix import corner
from tests.npz_graphs import read_npz

CORA = DATA / "cora.npz"


def training_of_one_process(file: Path, epochs: int) -> tuple[list[float], float]:
    """The example's losses on the whole graph with DGL's own graph, and the test accuracy of the best epoch."""
    require_dgl()
    from dgl.nn import SAGEConv

    data = in_memory(file)
    graph = dgl_graph(*data.ends(), data.total_nodes)
    x, labels, train, val, test = (torch.from_numpy(data.node_data["_N"][key]) for key in ("feat", "label", *SPLIT))
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


@pytest.mark.parametrize(
    ("graph", "workers"),
    [
        pytest.param("cora", 2, marks=pytest.mark.skipif(not CORA.exists(), reason="SAR_TEST_DATA names its folder")),
        corner("generated", 3),
    ],
)
def test_partition_then_train(tmp_path: Path, graph: str, workers: int) -> None:
    file = generated(tmp_path) if graph == "generated" else write_chunked(read_npz(CORA), tmp_path / "cora").parent
    options = partition(file, tmp_path, workers)
    said = run(*TORCHRUN, str(workers), "examples/full_graph.py", *options, "--epochs", "20")
    epoch = re.compile(r"^epoch \d+: loss ([\d.]+), validation accuracy [\d.]+$", re.MULTILINE)
    losses = [float(loss) for loss in epoch.findall(said)]
    expected_losses, expected_accuracy = training_of_one_process(file, 20)
    assert losses == pytest.approx(expected_losses, abs=1e-4)
    assert losses[-1] < 0.5 * losses[0]
    [accuracy] = re.findall(r"^test accuracy ([\d.]+)$", said, re.MULTILINE)
    assert float(accuracy) == pytest.approx(expected_accuracy, abs=1e-4)
    assert float(accuracy) > 0.69  # of the best epoch by validation, which is not the best one by test
