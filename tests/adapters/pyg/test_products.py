"""Layers send features, or products of them, whichever are narrower; and what keeps PyTorch Geometric's order."""

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch.nn.utils import parametrize

import sar
from sar.errors import DisagreementError
from tests.parity.harness import check, random_data
from tests.parity.pyg_layers import IN, edges_of, layer_results, random_parts

MADE = {
    "GCNConv": pyg.GCNConv,
    "SAGEConv": pyg.SAGEConv,
    "GraphConv": pyg.GraphConv,
    "GINConv": lambda i, o: pyg.GINConv(nn.Sequential(nn.Linear(i, o), nn.ReLU(), nn.Linear(o, 5))),
    "GINConv MLP": lambda i, o: pyg.GINConv(pyg.MLP([i, o, 5], norm=None)),
    "SGConv": lambda i, o: pyg.SGConv(i, o, 2),
    "TAGConv": lambda i, o: pyg.TAGConv(i, o, 2),
    "ChebConv": lambda i, o: pyg.ChebConv(i, o, 3),
}
"""Layers by their widths."""


def bytes_of(graph, name, width, out_width, *, with_gradient=True):
    """Bytes that this worker sends in a forward and a backward."""
    layer, x = MADE[name](width, out_width), torch.ones(graph.num_nodes(), width, requires_grad=with_gradient)
    edges, before = edges_of(graph), sar.comm.statistics()
    layer(x, edges).sum().backward()
    return (sar.comm.statistics() - before).bytes_sent


def columns(partition, name):
    """Asserts about the bytes of several widths; all other bytes, of agreements and norms of edges, are equal."""
    graph = sar.construct_full_graph(partition)
    both_ways = [bytes_of(graph, name, *widths) for widths in ((3, 3), (3, 40), (40, 3))]
    assert both_ways == both_ways[:1] * 3
    assert bytes_of(graph, name, 4, 4) > both_ways[0]
    # A product needs a gradient of its own, features do not.
    widths = ((3, 40), (4, 40), (4, 4), (4, 3), (40, 3))
    three, wide, equal, *products = [bytes_of(graph, name, *each, with_gradient=False) for each in widths]
    assert three < wide == equal < both_ways[0]
    assert products == [both_ways[0]] * 2


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("world_size", [2])
def test_the_narrower_side_travels(pool, world_size, name):
    pool.run(columns, name, per_rank=random_parts(world_size).partitions)


class Shifted(nn.Module):
    def forward(self, weight):
        return weight + 1


class TanhMessages(pyg.SAGEConv):
    def message(self, x_j):
        return x_j.tanh()


def tanh_hook(*given):
    return given[-1].tanh()


def sine_pre_hook(_, given):
    return given[0].sin()


def replace_linear(layer):
    layer.lin = nn.Linear(IN, 8).double()  # with a bias, which is added up


def tie(layer):
    layer.lin_r = layer.lin_l


def shift_weight(layer):
    parametrize.register_parametrization(layer.lin_l, "weight", Shifted())


CHANGES = {
    "forward hook": ("SAGEConv", lambda layer: layer.lin_l.register_forward_hook(tanh_hook)),
    "pre-hook": (
        "GCNConv wide",
        lambda layer: layer.lin.register_forward_pre_hook(sine_pre_hook),
    ),
    "hook of several": (
        "GINConv MLP",
        lambda layer: layer.nn.register_forward_pre_hook(sine_pre_hook),
    ),
    "message hook": ("GraphConv", lambda layer: layer.register_message_forward_hook(tanh_hook)),
    "propagate hook": ("GCNConv wide", lambda layer: layer.register_propagate_forward_hook(tanh_hook)),
    "own message": ("SAGEConv", lambda layer: setattr(layer, "message", lambda x_j: x_j.tanh())),
    "own class": ("SAGEConv", lambda layer: setattr(layer, "__class__", TanhMessages)),
    "own update": ("TAGConv", lambda layer: setattr(layer, "update", lambda inputs: inputs.tanh())),
    "parametrization": ("SAGEConv", shift_weight),
    "bias before the sum": ("GCNConv wide", replace_linear),
    "one linear for both": ("SAGEConv equal", tie),
    "maximum": ("GraphConv", lambda layer: setattr(layer, "aggr_module", pyg.aggr.MaxAggregation())),
}
"""Layers that keep the order of PyTorch Geometric, by what is changed."""


def changed(graph, data, how):
    name, change = CHANGES[how]
    return layer_results(graph, data, name, change)


@pytest.mark.parametrize("world_size", [2])
def test_changed_layers_give_their_own_results(pool, world_size):
    parts = random_parts(world_size)
    check(pool, parts, random_data(parts, torch.float64), [(changed, (how,)) for how in CHANGES], (1,))


def hook_on_one_worker(partition, width):
    graph = sar.construct_full_graph(partition)
    layer, x = pyg.SAGEConv(width, 4), torch.ones(graph.num_nodes(), width, requires_grad=True)
    if sar.rank() == 1:
        layer.lin_l.register_forward_hook(lambda *given: None)
    with pytest.raises(DisagreementError, match="as no module has hooks"):
        layer(x, edges_of(graph))


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("world_size", [2])
def test_a_hook_on_one_worker_is_told(pool, world_size, width):
    """Also if both orders send as many columns."""
    pool.run(hook_on_one_worker, width, per_rank=random_parts(world_size).partitions)
