"""Layers and functions of PyTorch Geometric on random edges made of those of a graph, equal to one machine."""

import random

import pytest
import torch
import torch.distributed as dist
from torch_geometric import utils

import sar
from tests.graphs import partition_in_memory, random_graph
from tests.parity.harness import Data, check, gradients, random_data
from tests.parity.pyg_layers import LAYERS, edges_of
from tests.parity.scenarios import scattered

NOT_ALIKE = ("ChebConv greatest", "DirGNNConv", "GPSConv", "SimpleConv std", "SimpleConv var", "FastRGCNConv")
NAMES = [name for name, layer in LAYERS.items() if isinstance(layer.call, str) and not name.startswith(NOT_ALIKE)]


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
    x = data.leaf("x")
    edges, weights, features = edges_of(graph), data.edges["w"].squeeze(1), data.edges["e"]
    for _ in range(r.randint(0, 4)):
        edges, weights, features = changed(r, x.detach(), edges, weights, features)
    if r.random() < 0.2:
        return gradients(along_edges(r, x, edges, weights, features), data, x=x)
    name = r.choice(NAMES)
    layer = LAYERS[name].make().double().train(not name.endswith("eval"))
    if dist.is_initialized():
        sar.convert_batchnorm(layer)
    if name.startswith("ChebConv"):  # its Laplacian has no loops of others
        kept = edges[0] != edges[1]
        edges, weights, features = utils.remove_self_loops(edges)[0], weights[kept], features[kept]
    values = Data(data.nodes, {"w": weights.unsqueeze(1), "e": features})
    return gradients(LAYERS[name].run(layer, x, edges, values), data, layer, x=x)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_random_calls(pool, world_size, seed):
    graph = random_graph(seed, 25, 130, no_in_edges=1)
    parts = partition_in_memory(graph, scattered(25, world_size, seed), world_size)
    cases = [(random_call, (50 * seed + number,)) for number in range(50)]
    settings = {"comm_buffer_bytes": 2000} if seed % 2 else {}
    check(pool, parts, random_data(parts, torch.float64, seed), cases, (1,), settings, timeout=300)
