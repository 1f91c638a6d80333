"""Layers of DGL and PyTorch Geometric on the empty batches of a worker with fewer seeds than others."""

import pytest
import torch
from torch_geometric.nn import (
    LSTMAggregation,
    MedianAggregation,
    SetTransformerAggregation,
    SimpleConv,
    SortAggregation,
)

import sar
from tests.parity.conv_layers import CONVS, TAKES_BLOCKS, among, precision_of
from tests.parity.harness import Data, deal, random_data
from tests.parity.pyg_layers import LAYERS
from tests.parity.scenarios import SCENARIOS

AGGREGATIONS = {
    "LSTM": lambda: LSTMAggregation(6, 6),
    "median": MedianAggregation,
    "set transformer": lambda: SetTransformerAggregation(6),
    "sort": lambda: SortAggregation(3),
}


def layers_of(format, batch):
    """Each layer with a call that makes its outputs of `x`, and the fields of nodes and edges in the batch."""
    if format == "pyg":
        fields = Data({"x": batch.x, "y": batch.y}, {"e": batch.e, "w": batch.w})
        for name, case in LAYERS.items():
            layer = sar.convert_batchnorm(case.make().double(), distributed=False)  # other tests have had an edge index
            yield name, layer, lambda layer, x, case=case: case.run(layer, x, batch.edge_index, fields)
        for name, make in AGGREGATIONS.items():
            yield name, SimpleConv(make()).double(), lambda layer, x: layer(x, batch.edge_index)
        return
    (block,) = batch
    for name, conv in CONVS.items():
        if among(TAKES_BLOCKS, name) and precision_of(name) == torch.float64:
            fields = Data(dict(block.srcdata), dict(block.edata))
            yield (
                name,
                conv.make().double(),
                lambda layer, x, conv=conv, fields=fields: conv.run(layer, block, x, fields.edges["w"], fields),
            )


def shapes_on_worker(mine, format):
    """The shapes of what layers make of a batch of the last worker's first node; the gradients are finite."""
    partition, data = mine
    graph = sar.construct_full_graph(partition)
    graph.edata.update({name: data.edges[name] for name in ("e", "w")})
    start, _ = partition.node_ranges[sar.rank()]
    seeds = torch.arange(start, start + (sar.rank() == sar.world_size() - 1))
    sampler = sar.DistNeighborSampler([3], input_node_features={name: data.nodes[name] for name in ("x", "y")})
    (batch,) = sar.DataLoader(graph, seeds, sampler, format=format)
    shapes = {}
    for name, layer, call in layers_of(format, batch):
        x = (batch.x if format == "pyg" else batch[0].srcdata["x"]).clone().requires_grad_()
        made = call(layer, x)
        outputs = made if isinstance(made, tuple) else (made,)
        if any(each.requires_grad for each in outputs):
            sum(each.sum() for each in outputs).backward()
        grads = [value.grad for value in (x, *layer.parameters()) if value.grad is not None]
        assert all(grad.isfinite().all() for grad in grads), name
        shapes[name] = [tuple(each.shape) for each in outputs]
    return len(seeds), shapes


@pytest.mark.parametrize("format", ["dgl", "pyg"])
@pytest.mark.parametrize("world_size", [2])
def test_layers_on_an_empty_batch(pool, format):
    parts = SCENARIOS["random"](2)
    given = deal(parts, random_data(parts, torch.float64))
    (none, empty), (one, whole) = pool.run(shapes_on_worker, format, per_rank=given, timeout=200)
    assert (none, one) == (0, 1)
    for name, shapes in whole.items():
        assert [shape[1:] for shape in empty[name]] == [shape[1:] for shape in shapes], name
        assert {shape[0] for shape in empty[name]} == {0}, name
