"""The example of R-GCN on workers, against the same model on the whole graph in one process of plain DGL and torch.

In float64, because Adam makes a whole step of a gradient that is nothing but rounding.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sar
from sar.partition.graph_source import ArrayEdges, GraphSource
from sar.partition.in_memory import divide
from sar.partition.ingest.chunked import write_chunked
from tests.examples.scripts import TORCHRUN, example, partition, run
from tests.graphs import DATA
from tests.matrix import corner
from tests.npz_graphs import read_npz
from tests.parity.harness import assert_close
from tests.workers import WorkerPool


def run_on_worker(name: str, argv: list[str]) -> tuple[list[float], Tensor, Tensor]:
    """Losses, this worker's final predictions, and the original IDs of its nodes with labels."""
    torch.set_default_dtype(torch.float64)
    losses, predictions = example(name).main(argv)
    data = sar.load_dgl_partition_data(argv[1], sar.rank(), "cpu")
    [target] = [t for t in data.node_type_names if f"{t}/label" in data.node_features]
    mine = data.node_features["_TYPE"] == data.node_type_names.index(target)
    return losses, predictions.detach(), data.node_features["orig_id"][mine]


def train_alone(
    model: nn.Module, inputs: tuple[Any, ...], labels: Tensor, train: Tensor, arguments: Any, more: Any = ()
) -> tuple[list[float], Tensor]:
    """The losses of training on one machine, and the predictions after it; `more` are further parameters."""
    parameters = [*model.parameters(), *more]
    optimizer = torch.optim.Adam(parameters, lr=arguments.lr, weight_decay=arguments.weight_decay)
    losses = []
    for _ in range(arguments.epochs):
        loss = functional.cross_entropy(model(*inputs)[train], labels[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        return losses, model(*inputs)


@pytest.fixture
def double() -> Iterator[None]:
    """Parameters in float64, in this process as on the workers."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def compare(results: list[Any], losses: list[float], predictions: Tensor) -> None:
    """The workers' losses, and their predictions in the original order, with those of one process."""
    for worker_losses, _, _ in results:
        assert worker_losses == pytest.approx(losses, rel=1e-9)
    assert losses[-1] < losses[0]
    ids = torch.cat([ids for _, _, ids in results])
    assert_close(torch.cat([made for _, made, _ in results]), predictions[ids])


def small_types() -> GraphSource:
    """Labels on one of three types; a type of one node, and a relation of one edge."""
    rng = np.random.default_rng(0)
    counts = {"paper": 80, "author": 40, "prize": 1}
    relations = {
        ("author", "writes", "paper"): 200,
        ("paper", "cites", "paper"): 160,
        ("paper", "wins", "prize"): 5,
        ("prize", "honours", "author"): 1,
    }
    edges = {
        etype: ArrayEdges(*(rng.integers(0, counts[etype[end]], n) for end in (0, 2))) for etype, n in relations.items()
    }
    labels = rng.integers(-1, 3, 80)
    split = rng.random(80) < 0.7
    masks = {"train_mask": split & (labels >= 0), "test_mask": ~split & (labels >= 0)}
    return GraphSource(counts, edges, {"paper": {"label": labels, **masks}}, {}).with_reverse_edges()


def aifb() -> GraphSource:
    if not (DATA / "aifb_het.npz").exists():
        pytest.skip("SAR_TEST_DATA names the folder of the test data sets")
    return read_npz(DATA / "aifb_het.npz").with_reverse_edges()


def rgcn(data: GraphSource, json_file: Path, num_parts: int, arguments: Any) -> tuple[list[float], Tensor]:
    """Training on one machine, from the embeddings that the workers draw for their nodes."""
    [(target, fields)] = [(ntype, fields) for ntype, fields in data.node_data.items() if fields]
    labels, train = (torch.from_numpy(fields[key]) for key in ("label", "train_mask"))
    edges = {etype: tuple(map(torch.from_numpy, next(ends.chunks()))) for etype, ends in data.edges.items()}
    graph = dgl.heterograph(edges, num_nodes_dict=data.num_nodes)
    x = {ntype: torch.empty(count, arguments.hidden) for ntype, count in data.num_nodes.items()}
    for part in range(num_parts):
        own = sar.load_dgl_partition_data(json_file, part, "cpu")
        kinds, ids = own.node_features["_TYPE"], own.node_features["orig_id"]
        rows = {ntype: ids[kinds == kind] for kind, ntype in enumerate(own.node_type_names)}
        drawn = example("rgcn").embeddings({t: len(r) for t, r in rows.items()}, arguments.hidden, part)
        for ntype in rows:
            x[ntype][rows[ntype]] = drawn[ntype].detach()
    leaves = {ntype: nn.Parameter(rows) for ntype, rows in x.items()}
    torch.manual_seed(0)
    num_classes = int(labels.max()) + 1
    model = example("rgcn").RGCN(list(edges), target, arguments.hidden, num_classes, arguments.layers)
    return train_alone(model, (graph, leaves), labels, train, arguments, leaves.values())


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("graph, world_size", [corner(small_types, 1), (small_types, 2), corner(aifb, 2)])
def test_rgcn_is_the_same_as_on_one_machine(
    pool: WorkerPool, tmp_path: Path, graph: Callable[[], GraphSource], world_size: int
) -> None:
    data = graph()
    json_file = divide(data, tmp_path, "typed", world_size).json_file
    argv = ["--partition-json", str(json_file), "--epochs", "3"]
    results = pool.run(run_on_worker, "rgcn", argv, timeout=120)
    compare(results, *rgcn(data, json_file, world_size, example("rgcn").parser.parse_args(argv)))


@pytest.mark.slow
def test_a_heterogeneous_graph_from_its_file_to_the_printed_losses(tmp_path: Path) -> None:
    data = small_types()
    forward = {etype: ends for etype, ends in data.edges.items() if "reversed" not in etype[1]}
    file = write_chunked(replace(data, edges=forward), tmp_path / "typed").parent
    left_out = "paper:wins:prize"
    argv = [*partition(file, tmp_path, 2, "rgcn", "--leave-out", left_out), "--epochs", "3"]
    said = run(*TORCHRUN, "2", "examples/rgcn.py", *argv)
    found = re.findall(r"^epoch \d+: loss ([\d.]+), accuracy train [\d.]+, test [\d.]+$", said, re.MULTILINE)
    kept = {etype: ends for etype, ends in data.edges.items() if "wins" not in etype[1]}
    alone = replace(data, edges=kept)
    losses, _ = rgcn(alone, Path(argv[1]), 2, example("rgcn").parser.parse_args(argv))
    assert [float(loss) for loss in found] == pytest.approx(losses, abs=1e-5)
