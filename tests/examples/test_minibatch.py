"""The examples of mini-batches and of evaluation: their numbers are those of plain DGL."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sar.adapters.dgl.models import dgl_graph
from sar.cli.demo import community_graph
from sar.common_tuples import SPLIT
from sar.partition.in_memory import divide, training_graph
from tests.examples.scripts import TORCHRUN, example, generated, in_double, losses_in, partition, run
from tests.matrix import corner

EPOCHS, FANOUTS = 3, (5, 5)
OPTIONS = ["--epochs", str(EPOCHS), "--batch-size", "50", "--fanouts", *map(str, FANOUTS)]


def accuracies_alone(graph: Any, parameters: Path) -> list[float]:
    """On the training, validation and test nodes, by the example's model in one process."""
    x, labels = graph.ndata["feat"], graph.ndata["label"]
    model = example("minibatch").GraphSAGE(x.shape[1], 64, int(labels.max()) + 1, len(FANOUTS))
    model.load_state_dict(torch.load(parameters, weights_only=True))
    right = model([graph] * len(FANOUTS), x).argmax(1) == labels
    return [right[graph.ndata[mask]].double().mean().item() for mask in SPLIT]


@pytest.mark.parametrize("script", [corner("distdgl_then_full_eval"), corner("minibatch")])
def test_accuracy_on_the_whole_graph(script: str, tmp_path: Path) -> None:
    graph, parameters = generated(), tmp_path / "parameters.pt"
    place, options = partition(graph, tmp_path), [*OPTIONS, "--parameters", str(parameters)]
    if script == "minibatch":
        said = run(*TORCHRUN, "2", "examples/minibatch.py", *place, *options)
    else:
        said = run("examples/distdgl_cluster.py", *place, "--trainers", "2", f"examples/{script}.py", *options)
    assert len(losses_in(said)) == EPOCHS
    whole = re.compile(r"^on the whole graph: accuracy train ([\d.]+), val ([\d.]+), test ([\d.]+)$", re.MULTILINE)
    [found] = whole.findall(said)
    expected = accuracies_alone(graph, parameters)
    assert list(map(float, found)) == pytest.approx(expected, abs=1e-3)
    assert min(expected) > 0.4  # 0.25 by chance


def test_evaluation_with_one_partition_in_memory_at_a_time(tmp_path: Path) -> None:
    """Four partitions on one process: logits and accuracies are those of DGL on one machine."""
    graph = in_double(training_graph(community_graph(1500, 9000, num_features=16, num_classes=4)))
    json_file = divide(graph, tmp_path / "parts", "generated", 4).json_file
    torch.manual_seed(0)
    model = example("minibatch").GraphSAGE(16, 64, 4, 3)
    torch.save(model.state_dict(), tmp_path / "sage.pt")
    (tmp_path / "spill").mkdir()
    launch = ["-m", "sar", "launch", "--workers", "1", "--resident", "1", "--spill", str(tmp_path / "spill")]
    options = ["--partition-json", str(json_file), "--parameters", str(tmp_path / "sage.pt")]
    said = run(*launch, "examples/evaluate.py", *options, "--logits", str(tmp_path / "logits.npy"))
    x, labels = (torch.from_numpy(graph.node_data["_N"][key]) for key in ("feat", "label"))
    whole = dgl_graph(*graph.ends(), graph.total_nodes)
    expected = model.double()([whole] * 3, x)
    found = torch.from_numpy(np.load(tmp_path / "logits.npy"))
    assert (found - expected).abs().max() < 1e-9
    right = (expected.argmax(1) == labels).double()
    shares = [right[torch.from_numpy(graph.node_data["_N"][mask]).bool()].mean().item() for mask in SPLIT]
    assert "accuracy " + ", ".join(f"{m.split('_')[0]} {s:.4f}" for m, s in zip(SPLIT, shares, strict=True)) in said
