"""Layers in the place of DGL's, with the parameters that DGL draws, against DGL's."""

import pytest
import torch

import sar
from sar.adapters.dgl.shim import require_dgl
from sar.nn import plain_layers
from tests.parity.harness import check, parameter_gradients, random_data, weighted_sum
from tests.parity.scenarios import SCENARIOS

LAYERS = {"SAGEConv": ("mean",), "GraphConv": (), "GATConv": ()}
"""Layers, and what DGL's takes besides."""


def train(graph, data, name, shape):
    if isinstance(graph, sar.GraphShardManager):
        layer = getattr(plain_layers, name)(*shape)
    else:
        options = {} if name == "SAGEConv" else {"allow_zero_in_degree": True}
        layer = getattr(require_dgl().nn, name)(*shape, *LAYERS[name], **options)
    layer.double()
    x = data.leaf("x")
    out = layer(graph, x).flatten(1)
    weighted_sum(out, data.nodes["cotangent"]).backward()
    return {"node out": out, "node x.grad": x.grad, **parameter_gradients(layer)}


@pytest.mark.parametrize("scenario", ["random", "isolated"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_plain_layers(pool, world_size, scenario):
    parts = SCENARIOS[scenario](world_size)
    shapes = {"SAGEConv": [(6, 4), (6, 8)], "GraphConv": [(6, 4), (6, 8)], "GATConv": [(6, 2, 3)]}
    cases = [(train, (name, shape)) for name in LAYERS for shape in shapes[name]]
    check(pool, parts, random_data(parts, torch.float64), cases, modes=(1, 3))
