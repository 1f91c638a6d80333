"""Random edges made of those of a graph, and random layers and functions of PyTorch Geometric, beside one machine."""

import random

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric import utils

from tests.graphs import partition_in_memory, random_graph
from tests.parity.harness import check, parameter_gradients, random_data, weighted_sum
from tests.parity.pyg_layers import IN, OUT, edges_of
from tests.parity.scenarios import scattered

DEGREES = torch.tensor([1, 2, 3, 4])
LAYERS = {
    "ChebConv": (lambda r: pyg.ChebConv(IN, OUT, 3), ""),
    "EdgeConv": (lambda r: pyg.EdgeConv(nn.Linear(2 * IN, OUT)), ""),
    "FiLMConv": (lambda r: pyg.FiLMConv(IN, OUT), ""),
    "GATConv": (lambda r: pyg.GATConv(IN, OUT, heads=2, add_self_loops=r.random() < 0.5), ""),
    "GATv2Conv": (lambda r: pyg.GATv2Conv(IN, OUT, edge_dim=6), "features"),
    "GCNConv": (lambda r: pyg.GCNConv(IN, OUT, add_self_loops=r.random() < 0.5), "weights"),
    "GINEConv": (lambda r: pyg.GINEConv(nn.Linear(IN, OUT)), "features"),
    "GeneralConv": (lambda r: pyg.GeneralConv(IN, OUT, 6, attention=True), "features"),
    "GraphConv": (lambda r: pyg.GraphConv(IN, OUT, aggr=r.choice(["add", "mean", "max"])), "weights"),
    "LEConv": (lambda r: pyg.LEConv(IN, OUT), "weights"),
    "PNAConv": (lambda r: pyg.PNAConv(IN, OUT, ["mean", "std"], ["linear"], DEGREES, edge_dim=6), "features"),
    "ResGatedGraphConv": (lambda r: pyg.ResGatedGraphConv(IN, OUT, edge_dim=6), "features"),
    "SAGEConv": (lambda r: pyg.SAGEConv(IN, OUT, aggr=r.choice(["mean", "max", "sum", ["mean", "std"]])), ""),
    "SimpleConv": (lambda r: pyg.SimpleConv(r.choice(["median", "mul", "min", "softmax"])), ""),
    "TAGConv": (lambda r: pyg.TAGConv(IN, OUT, 2), "weights"),
    "TransformerConv": (lambda r: pyg.TransformerConv(IN, OUT, 2, edge_dim=6), "features"),
}
"""Layers made with some option, and which values of edges they take."""


def along_edges(r, x, edges, weights, features):
    """Functions that a model may call with either end of the edges."""
    rows, (sources, destinations), count = x[edges[0]] * x[edges[1]], edges, len(x)
    how = r.choice(["sum", "mean"])
    return r.choice(
        [
            lambda: utils.scatter(rows * weights.view(-1, 1), destinations, 0, count, how),
            lambda: utils.scatter(rows * features, sources, 0, count, how),
            lambda: utils.scatter(
                utils.softmax(rows, destinations, num_nodes=count) * features, destinations, 0, count
            ),
            lambda: utils.scatter(utils.softmax(rows, sources, num_nodes=count) * features, destinations, 0, count),
            lambda: x * (utils.degree(sources, count) + utils.degree(destinations, count)).view(-1, 1),
        ]
    )()


def changed(r, x, edges, weights, features):
    """Other edges between the same nodes, with their weights and features."""
    how = r.choice(["mask", "remove", "add", "add remaining", "stack", "part of the rows", "order", "copy", "twice"])
    kept = torch.ones_like(weights, dtype=torch.bool)
    if how in ("mask", "part of the rows"):
        kept = weights > r.uniform(0.3, 1.2)
    elif how in ("remove", "add remaining"):
        kept = edges[0] != edges[1]
    loops = torch.full_like(x, 0.5)
    if how == "add":
        edges, weights = utils.add_self_loops(edges, weights, r.choice([1.0, 0.3, "mean", "add", "max"]), len(x))
        return edges, weights, torch.cat([features, loops])
    if how == "add remaining":
        edges, weights = utils.add_remaining_self_loops(edges, weights, 0.3, len(x))
        return edges, weights, torch.cat([features[kept], loops])
    if how == "remove":
        edges, weights = utils.remove_self_loops(edges, weights)
        return edges, weights, features[kept]
    if how == "twice":
        return torch.cat([edges, edges], 1), torch.cat([weights, weights / 2]), torch.cat([features, -features])
    if how == "order":
        order = torch.argsort(weights)
        return edges[:, order], weights[order], features[order]
    if how == "part of the rows":
        sources, destinations = edges.unbind(0)
        edges = torch.stack([sources[kept], destinations[kept]])
    else:
        edges = edges.clone().long()[:, kept]
    return edges, weights[kept], features[kept]


def random_call(graph, data, seed):
    r = random.Random(seed)
    torch.manual_seed(seed)
    x, layer = data.leaf("x"), nn.Identity()
    edges, weights, features = edges_of(graph), data.edges["w"].squeeze(1), data.edges["e"]
    for _ in range(r.randint(0, 4)):
        edges, weights, features = changed(r, x.detach(), edges, weights, features)
    name = r.choice(["", *LAYERS])
    if name:
        make, takes = LAYERS[name]
        layer = make(r).double()
        if name == "ChebConv":  # its Laplacian has no loops of others
            edges, weights = utils.remove_self_loops(edges, weights)
        out = layer(x, edges, *{"": (), "weights": (weights,), "features": (features,)}[takes])
    else:
        out = along_edges(r, x, edges, weights, features)
    weighted_sum(out, data.nodes["cotangent"]).backward()
    return {"node out": out, "node x.grad": x.grad, **parameter_gradients(layer)}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_random_calls(pool, world_size, seed):
    graph = random_graph(seed, 25, 130, no_in_edges=1)
    parts = partition_in_memory(graph, scattered(25, world_size, seed), world_size)
    cases = [(random_call, (50 * seed + number,)) for number in range(50)]
    settings = {"comm_buffer_bytes": 2000} if seed % 2 else {}
    check(pool, parts, random_data(parts, torch.float64, seed), cases, (1,), settings, timeout=300)
