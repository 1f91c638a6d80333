"""Training on real heterogeneous graphs: every loss and the final accuracy equal those of one process of DGL."""

from collections.abc import Callable
from functools import partial

import dgl
import dgl.nn.pytorch as dglnn
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import sar
from tests.hetero_graphs import load_hetero, partition_hetero
from tests.matrix import corner
from tests.parity.harness import build
from tests.parity.scenarios import scattered

WIDTH, CLASSES, EPOCHS = 16, 4, 6
TRAIN, TEST = 1, 2


class PerRelation(nn.Module):
    """Two layers with a convolution for every relation: GraphConv, then SAGEConv."""

    def __init__(self, etypes: list[tuple[str, str, str]]):
        super().__init__()
        first = {etype: dglnn.GraphConv(WIDTH, WIDTH, norm="right") for etype in sorted(etypes)}
        last = {etype: dglnn.SAGEConv(WIDTH, CLASSES, "mean") for etype in sorted(etypes)}
        self.layers = nn.ModuleList([dglnn.HeteroGraphConv(first), dglnn.HeteroGraphConv(last, "mean")])

    def forward(self, graphs, x):
        x = {ntype: h.relu() for ntype, h in self.layers[0](graphs[0], x).items()}
        return self.layers[1](graphs[1], x)


def train(model: nn.Module, x: list[Tensor], step: Callable, evaluate: Callable, labels, split) -> tuple:
    """Losses of all epochs, and how many test nodes are right after the last.

    Args:
        model: replicated on all workers.
        x: inputs to learn, this worker's rows.
        step: makes logits of the training nodes.
        evaluate: makes logits of this worker's nodes.
        labels, split: of this worker's nodes, (N,).
    """
    num_train = total((split == TRAIN).sum())
    optimizer = torch.optim.Adam([*model.parameters(), *x], lr=0.02)
    losses = []
    for _ in range(EPOCHS):
        loss = functional.cross_entropy(step(), labels[split == TRAIN], reduction="sum") / num_train
        optimizer.zero_grad()
        loss.backward()
        if dist.is_initialized():
            sar.gather_grads(model)
        optimizer.step()
        losses.append(total(loss.detach()))
    with torch.no_grad():
        right = evaluate()[split == TEST].argmax(1) == labels[split == TEST]
    return losses, total(right.sum())


def total(value: Tensor) -> float:
    """The sum over workers."""
    if dist.is_initialized():
        sar.comm.all_reduce(value, dist.ReduceOp.SUM)
    return value.item()


def typed_graph(graph, blocks, columns, target, make) -> tuple:
    """Training of a model of several relations, on message flow graphs if there are any; `columns` by node type."""
    torch.manual_seed(1)
    model = make().double()
    x = {ntype: nn.Parameter(fields["x"].clone()) for ntype, fields in columns.items()}
    split = columns[target]["split"]

    def evaluate():
        return model([graph, graph], x)[target]

    def step():
        if not blocks:
            return evaluate()[split == TRAIN]
        return model(blocks, {t: x[t][rows] for t, rows in blocks[0].input_nodes.items()})[target]

    return train(model, list(x.values()), step, evaluate, columns[target]["label"], split)


def typed_graph_on_worker(partition, how, target, make):
    graph = build(partition, 1 if how == "blocks" else how)
    names = {t: [key for key in partition.node_features if key.startswith(f"{t}/")] for t in graph.ntypes}
    columns = {t: {key.partition("/")[2]: partition.node_features[key] for key in names[t]} for t in names}
    blocks = []
    if how == "blocks":
        seeds = {target: (columns[target]["split"] == TRAIN).nonzero().squeeze(1)}
        blocks = sar.construct_mfgs(partition, seeds, 2)
    return typed_graph(graph, blocks, columns, target, make)


def typed_graph_of_directory(path, *args):
    return typed_graph_on_worker(sar.load_dgl_partition_data(path, sar.rank(), "cpu"), *args)


def prepared(name: str) -> tuple:
    """The graph with inputs `x`, `label` and `split` as node fields, and the target type."""
    graph, labels, train_ids, test_ids, target = load_hetero(name, without=("member", "head"))
    generator = torch.Generator().manual_seed(2)
    for ntype in graph.ntypes:
        data = graph.nodes[ntype].data
        count = graph.num_nodes(ntype)
        data["x"] = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
        if "feat" in data:
            feat = data.pop("feat").double()
            data["x"] = feat @ torch.randn(feat.shape[1], WIDTH, generator=generator, dtype=torch.float64) / 8
        data["label"] = torch.zeros(count, dtype=torch.int64)
        data["split"] = torch.zeros(count, dtype=torch.int64)
    graph.nodes[target].data["label"] = labels
    for ids, mark in ((train_ids, TRAIN), (test_ids, TEST)):
        graph.nodes[target].data["split"][ids] = mark
    return graph, target


def assert_same(by_rank, expected, num_test: int) -> None:
    """The same losses to round-off and the same accuracy, which is better than chance."""
    losses, right = expected
    assert losses[-1] < 0.9 * losses[0]
    assert right / num_test > 0.5
    for found in by_rank:
        assert found[0] == pytest.approx(losses, rel=1e-9)
        assert found[1] == right


@pytest.mark.parametrize("world_size", [2, corner(3)])
@pytest.mark.parametrize("name", [corner("aifb_het"), "acm_het"])
def test_several_relations(pool, world_size, name, tmp_path):
    graph, target = prepared(name)
    make = partial(PerRelation, graph.canonical_etypes)
    columns = {t: dict(graph.nodes[t].data) for t in graph.ntypes}
    expected = typed_graph(graph, [], columns, target, make)
    num_test = int((columns[target]["split"] == TEST).sum())
    if name == "acm_het":
        dgl.distributed.partition_graph(graph, name, world_size, str(tmp_path), part_method="metis")
        how_to_run = partial(pool.run, typed_graph_of_directory, str(tmp_path / f"{name}.json"))
    else:  # with a relation of one edge, which DGL cannot partition
        assignment = {t: scattered(graph.num_nodes(t), world_size) for t in graph.ntypes}
        parts = partition_hetero(graph, assignment, world_size)
        how_to_run = partial(pool.run, typed_graph_on_worker, per_rank=parts.partitions)
    for how in (1, 2, 3, "blocks") if world_size == 2 else (1, "blocks"):
        assert_same(how_to_run(how, target, make, timeout=100), expected, num_test)
