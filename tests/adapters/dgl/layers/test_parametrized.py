"""Layers whose weights are parametrized, with state: a forward reads each weight as often as DGL's own does."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from sar.adapters.dgl.patched_layers import PATCHED_LAYERS
from tests.parity.conv_layers import CONVS, among, layer_of, precision_of
from tests.parity.harness import check, random_data
from tests.parity.scenarios import SCENARIOS

PATCHED = {patch.layer.removeprefix("conv.").removeprefix("utils.") for patch in PATCHED_LAYERS}
# Python functions run modules for each tile or in-degree; and one module has a result that nobody reads.
LEFT_OUT = ("PNAConv", "DGNConv", "HGTConv", "RelGraphConv", "GatedGraphConv etypes", "DotGatConv pair")
LEFT_OUT += ("SAGEConv lstm", "SAGEConv lstm, edge_weight")
LAYERS = [name for name in CONVS if layer_of(name) in PATCHED and not among(LEFT_OUT, name)]


class Counting(nn.Module):
    """A parametrization that gives another value at each read."""

    def __init__(self):
        super().__init__()
        self.reads = 0

    def forward(self, weight):
        self.reads += 1
        return weight * (1 + 0.1 * self.reads)


def counted(graph, data, name):
    layer = CONVS[name].make().to(data.nodes["x"])
    counts = {}
    for path, parameter in list(layer.named_parameters()):
        if parameter.dim() > 1:
            owner, _, attribute = path.rpartition(".")
            counts[path] = Counting()
            parametrize.register_parametrization(layer.get_submodule(owner), attribute, counts[path], unsafe=True)
    w = data.edges["w"]
    rows = data.nodes["x"].clone(), data.leaf("x") * 1  # GroupRevRes frees what it is given
    outputs = [CONVS[name].run(layer, graph, x, w, data) for x in rows]
    outputs = [output[0] if isinstance(output, tuple) else output for output in outputs]
    results = {f"node output {number}": output for number, output in enumerate(outputs)}
    return results | {f"same reads of {path}": torch.tensor(each.reads, dtype=w.dtype) for path, each in counts.items()}


def counts_of_reads():
    return [(counted, (name,)) for name in LAYERS if precision_of(name) is torch.float64]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_forward_reads_a_weight_as_often_as_in_dgl(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    check(pool, parts, random_data(parts, torch.float64), counts_of_reads(), (1,), timeout=100)


def normalised(graph, data, name):
    """Three steps with spectral_norm or weight_norm."""
    layer = CONVS[name].make().double()
    owner = layer.fc_neigh if name.startswith("SAGE") else layer.fc if hasattr(layer, "fc") else layer
    parametrizations.weight_norm(owner) if "right" in name else parametrizations.spectral_norm(owner)
    x = data.leaf("x")
    for _ in range(3):
        out = CONVS[name].run(layer, graph, x, data.edges["w"], data)
    out.square().sum().backward()
    return {"node out": out, "node x.grad": x.grad}


@pytest.mark.parametrize("world_size", [2])
def test_norms_of_weights(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    names = ("GraphConv both", "GraphConv right", "GraphConv both, wide", "GraphConv left, edge_weight", "GATConv")
    cases = [(normalised, (name,)) for name in (*names, "SAGEConv mean", "SAGEConv mean, wide")]
    check(pool, parts, random_data(parts, torch.float64), cases, (1, 2))
