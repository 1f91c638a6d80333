"""The mini-batch examples: what they say of the whole graph, against the same parameters in plain DGL."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from sar.adapters.dgl.models import dgl_graph
from sar.cli.demo import community_graph
from sar.partition.graph_data import SPLIT, write_npz
from sar.partition.in_memory import divide
from sar.partition.ingest.datasets import load_dataset
from tests.examples.test_full_graph import run
from tests.examples.test_models import example
from tests.matrix import corner

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
EPOCHS, FANOUTS = 3, (5, 5)
OPTIONS = ["--epochs", str(EPOCHS), "--batch-size", "50", "--fanouts", *map(str, FANOUTS)]


def accuracies_alone(file: Path, parameters: Path) -> list[float]:
    """On the training, validation and test nodes, by the example's model in one process."""
    data = load_dataset(str(file)).with_split().with_reverse_edges().with_self_loops()
    graph = dgl_graph(torch.from_numpy(data.src), torch.from_numpy(data.dst), data.num_nodes)
    x, labels = (torch.from_numpy(data.node_data[key]) for key in ("feat", "label"))
    model = example("minibatch").GraphSAGE(x.shape[1], 64, int(labels.max()) + 1, len(FANOUTS))
    model.load_state_dict(torch.load(parameters, weights_only=True))
    right = model([graph] * len(FANOUTS), x).argmax(1) == labels
    return [right[torch.from_numpy(data.node_data[mask])].double().mean().item() for mask in SPLIT]


@pytest.mark.parametrize("script", [corner("distdgl_then_full_eval"), corner("minibatch")])
def test_accuracy_on_the_whole_graph(script: str, tmp_path: Path) -> None:
    file, parameters = tmp_path / "generated.npz", tmp_path / "parameters.pt"
    write_npz(community_graph(400, 4000, num_features=16, num_classes=4), file)
    out = tmp_path / "partitions"
    run("examples/partition_graph.py", "--dataset", str(file), "--parts", "2", "--out", str(out))
    json_file = str(out / "generated.json")
    options = [*OPTIONS, "--parameters", str(parameters)]
    if script == "minibatch":
        said = run(*TORCHRUN, "examples/minibatch.py", "--partition-json", json_file, *options)
    else:
        cluster = ["examples/distdgl_cluster.py", "--partition-json", json_file, "--trainers", "2"]
        said = run(*cluster, f"examples/{script}.py", *options)
    assert len(re.findall(r"^epoch \d+: loss", said, re.MULTILINE)) == EPOCHS
    whole = re.compile(r"^on the whole graph: accuracy train ([\d.]+), val ([\d.]+), test ([\d.]+)$", re.MULTILINE)
    [found] = whole.findall(said)
    expected = accuracies_alone(file, parameters)
    assert list(map(float, found)) == pytest.approx(expected, abs=1e-3)
    assert min(expected) > 0.4  # 0.25 by chance


def test_evaluation_with_one_partition_in_memory_at_a_time(tmp_path: Path) -> None:
    """Four partitions on one process: logits and accuracies are those of DGL on one machine."""
    graph = community_graph(1500, 9000, num_features=16, num_classes=4).with_split().with_self_loops()
    graph.node_data["feat"] = graph.node_data["feat"].astype(np.float64)
    json_file = divide(graph, tmp_path / "parts", "generated", 4).json_file
    torch.manual_seed(0)
    model = example("minibatch").GraphSAGE(16, 64, 4, 3)
    torch.save(model.state_dict(), tmp_path / "sage.pt")
    (tmp_path / "spill").mkdir()
    launch = ["-m", "sar", "launch", "--workers", "1", "--resident", "1", "--spill", str(tmp_path / "spill")]
    options = ["--partition-json", str(json_file), "--parameters", str(tmp_path / "sage.pt")]
    said = run(*launch, "examples/evaluate.py", *options, "--logits", str(tmp_path / "logits.npy"))
    x, labels = (torch.from_numpy(graph.node_data[key]) for key in ("feat", "label"))
    whole = dgl_graph(torch.from_numpy(graph.src), torch.from_numpy(graph.dst), graph.num_nodes)
    expected = model.double()([whole] * 3, x)
    found = torch.from_numpy(np.load(tmp_path / "logits.npy"))
    assert (found - expected).abs().max() < 1e-9
    right = (expected.argmax(1) == labels).double()
    shares = [right[torch.from_numpy(graph.node_data[mask]).bool()].mean().item() for mask in SPLIT]
    assert "accuracy " + ", ".join(f"{m.split('_')[0]} {s:.4f}" for m, s in zip(SPLIT, shares, strict=True)) in said


@pytest.mark.slow
def test_links_are_told_from_other_pairs(tmp_path: Path) -> None:
    file, out = tmp_path / "generated.npz", tmp_path / "partitions"
    write_npz(community_graph(400, 4000, num_features=16, num_classes=20, homophily=0.95, signal=2.0), file)
    run("examples/partition_graph.py", "--dataset", str(file), "--parts", "2", "--out", str(out))
    options = ["--epochs", "3", "--partition-json", f"{out}/generated.json"]
    said = run(*TORCHRUN, "examples/link_prediction_minibatch.py", *options)
    lines = re.findall(r"^epoch \d+: loss ([\d.]+), test MRR ([\d.]+)$", said, re.MULTILINE)
    losses, ranks = (list(map(float, column)) for column in zip(*lines, strict=True))
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert min(ranks) > 0.2  # 0.05 by chance
