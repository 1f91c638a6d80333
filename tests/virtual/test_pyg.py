"""Layers of PyTorch Geometric in turns: what one worker's layer puts in place, no other worker sees."""

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg

import sar
from tests.matrix import corner
from tests.parity.harness import check, parameter_gradients, random_data, weighted_sum
from tests.parity.pyg_layers import edges_of, gps, random_parts, sorted_by_destination
from tests.virtual.virtual_pool import VirtualPool

TYPES = ("node", "cites", "node"), ("node", "likes", "node")


def over_two_types(layer, x, edges, data):
    return layer({"node": x}, dict.fromkeys(TYPES, edges))["node"]


def also_aggregating_rows(layer, x, edges, data):
    return sorted_by_destination(layer, x, edges, data) + layer.aggr_module(x, torch.arange(len(x)))[:, :4]


LAYERS = {
    "GPSConv": (lambda: gps(None), lambda layer, x, edges, data: layer(x, edges)),
    "HANConv": (lambda: pyg.HANConv(6, 4, (["node"], TYPES), heads=2), over_two_types),
    "SAGEConv": (lambda: pyg.SAGEConv(6, 4, aggr="lstm"), also_aggregating_rows),
}


def between_plain_graphs(graph, data, name):
    """The layer on the whole graph; before, all workers run it on a graph of their own, and afterwards the first."""
    torch.manual_seed(3)
    make, call = LAYERS[name]
    layer, alone, own = make().double(), torch.randn(5, 6).double(), torch.randint(5, (2, 12))
    x, edges = data.leaf("x"), edges_of(graph)  # nothing is put in place before there is an edge index
    before = call(layer, alone, own, data)
    out = call(layer, x, edges, data)
    weighted_sum(out, data.nodes["cotangent"]).backward()
    is_first = not dist.is_initialized() or sar.rank() == 0
    after = call(layer, alone, own, data) if is_first else torch.zeros_like(before)
    made = {"same before": before, "sum after": after, "node out": out, "node x.grad": x.grad}
    return made | parameter_gradients(layer)


@pytest.mark.parametrize("world_size, each", [(1, 2), corner(2, 2)])
def test_layers_between_those_on_plain_graphs(world_size, each):
    parts = random_parts(world_size * each)
    cases = [(between_plain_graphs, (name,)) for name in LAYERS]
    check(VirtualPool(world_size, each), parts, random_data(parts, torch.float64), cases, (1,))
