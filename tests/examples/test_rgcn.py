"""The example of R-GCN on workers, against the same model on the whole graph in one process of plain DGL and torch.

In float64, because Adam makes a whole step of a gradient that is nothing but rounding.
"""

import re
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sar
from tests.examples.scripts import TORCHRUN, example, partition, run, train_alone
from tests.matrix import corner
from tests.parity.harness import assert_close
from tests.workers import WorkerPool


def run_on_worker(argv: list[str]) -> tuple[list[float], Tensor, Tensor]:
    """Losses, this worker's final predictions, and the original IDs of its papers."""
    torch.set_default_dtype(torch.float64)
    losses, predictions = example("rgcn").main(argv)
    data = sar.load_dgl_partition_data(argv[1], sar.rank(), "cpu")
    papers = data.node_features["_TYPE"] == data.node_type_names.index("paper")
    return losses, predictions.detach(), data.node_features["orig_id"][papers]


def small_types() -> Any:
    """Labels on one of three types; a type of one node, and a relation of one edge."""
    rng = np.random.default_rng(0)
    counts = {"paper": 80, "author": 40, "prize": 1}
    relations = {
        ("author", "writes", "paper"): 200,
        ("paper", "cites", "paper"): 160,
        ("paper", "wins", "prize"): 5,
        ("prize", "honours", "author"): 1,
    }
    edges = {etype: tuple(rng.integers(0, counts[etype[end]], n) for end in (0, 2)) for etype, n in relations.items()}
    graph = dgl.heterograph(edges, counts)
    labels, split = torch.from_numpy(rng.integers(-1, 3, 80)), torch.from_numpy(rng.random(80) < 0.7)
    masks = {"train_mask": split & (labels >= 0), "test_mask": ~split & (labels >= 0)}
    graph.nodes["paper"].data.update(label=labels, **masks)
    return graph


def train_in_one_process(graph: Any, json_file: Path, num_parts: int, argv: list[str]) -> tuple[list[float], Tensor]:
    """Training on one machine, from the embeddings that the workers draw for their nodes."""
    arguments = example("rgcn").parser.parse_args(argv)
    labels, train = (graph.nodes["paper"].data[name] for name in ("label", "train_mask"))
    x = {ntype: torch.empty(graph.num_nodes(ntype), arguments.hidden) for ntype in graph.ntypes}
    for part in range(num_parts):
        own = sar.load_dgl_partition_data(json_file, part, "cpu")
        kinds, ids = own.node_features["_TYPE"], own.node_features["orig_id"]
        rows = {ntype: ids[kinds == kind] for kind, ntype in enumerate(own.node_type_names)}
        drawn = example("rgcn").embeddings({t: len(r) for t, r in rows.items()}, arguments.hidden, part)
        for ntype in rows:
            x[ntype][rows[ntype]] = drawn[ntype].detach()
    leaves = {ntype: nn.Parameter(rows) for ntype, rows in x.items()}
    torch.manual_seed(0)
    etypes = sorted(graph.canonical_etypes)
    model = example("rgcn").RGCN(etypes, "paper", arguments.hidden, int(labels.max()) + 1, arguments.layers)
    return train_alone(model, (graph, leaves), labels, train, arguments, leaves.values())


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("world_size", [corner(1), 2])
def test_rgcn_is_the_same_as_on_one_machine(pool: WorkerPool, tmp_path: Path, world_size: int) -> None:
    graph = example("partition_graph").prepare(small_types())
    sar.partition_graph(graph, "typed", world_size, tmp_path)
    argv = ["--partition-json", str(tmp_path / "typed.json"), "--epochs", "3"]
    results = pool.run(run_on_worker, argv, timeout=120)
    losses, predictions = train_in_one_process(graph, tmp_path / "typed.json", world_size, argv)
    for worker_losses, _, _ in results:
        assert worker_losses == pytest.approx(losses, rel=1e-9)
    assert losses[-1] < losses[0]
    ids = torch.cat([ids for _, _, ids in results])
    assert_close(torch.cat([made for _, made, _ in results]), predictions[ids])


@pytest.mark.slow
def test_a_heterogeneous_graph_from_its_file_to_the_printed_losses(tmp_path: Path) -> None:
    graph = small_types()
    argv = [*partition(graph, tmp_path, 2, "rgcn"), "--epochs", "3"]
    said = run(*TORCHRUN, "2", "examples/rgcn.py", *argv)
    found = re.findall(r"^epoch \d+: loss ([\d.]+), accuracy train [\d.]+, test [\d.]+$", said, re.MULTILINE)
    losses, _ = train_in_one_process(example("partition_graph").prepare(graph), Path(argv[1]), 2, argv)
    assert [float(loss) for loss in found] == pytest.approx(losses, abs=1e-5)
