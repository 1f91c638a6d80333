"""Every convolution of DGL on the distributed graph: outputs and all gradients equal single-machine DGL.

`tables.py` makes the table of docs/layers.md from these layers.
"""

from functools import partial

import dgl.nn.pytorch as dglnn
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import sar
from tests.graphs import EdgeList, PartitionedGraph, partition_in_memory, random_graph
from tests.matrix import corner
from tests.parity.blocks import some_seeds
from tests.parity.conv_layers import (
    CONVS,
    IN,
    NEEDS_THREE_SOURCES,
    OUT,
    REGISTRY,
    TAKES_BLOCKS,
    among,
    conv_gradients,
    layer_of,
    precision_of,
)
from tests.parity.harness import MODES, check, gradients, random_data
from tests.parity.scenarios import SCENARIOS, scattered

# DGL refuses nodes without in-edges, or gives them NaN.
NEEDS_IN_EDGES = ("EGATConv", "TWIRLSUnfoldingAndAttention")


def with_in_edges(workers: int, *, of_three: bool = False) -> PartitionedGraph:
    """A random graph in which every node has a self-loop; `of_three`: and two more sources, and no parallel edges."""
    graph, nodes = random_graph(8, 30, 150), torch.arange(30)
    rings = [torch.stack([(nodes + step) % 30, nodes]) for step in range(3 if of_three else 1)]
    ends = torch.cat([torch.stack([graph.src, graph.dst]), *rings], dim=1)
    src, dst = torch.unique(ends, dim=1) if of_three else ends
    return partition_in_memory(EdgeList(src, dst, 30), scattered(30, workers), workers)


@pytest.mark.parametrize("name", CONVS)
@pytest.mark.parametrize("world_size, modes", [(2, (1,)), corner(2, (2, 3)), corner(3, MODES)])
def test_convolution(pool, world_size, modes, name):
    parts = with_in_edges(world_size, of_three=name in NEEDS_THREE_SOURCES)
    data = random_data(parts, precision_of(name))
    check(pool, parts, data, [(conv_gradients, (name,))], modes)
    if 1 in modes and among(TAKES_BLOCKS, name):
        seeds = some_seeds(parts, "not the first" if world_size == 2 else "uneven")
        check(pool, parts, data, [(conv_gradients, (name, torch.cat(seeds)))])


@pytest.mark.parametrize("scenario", ["first worker without nodes", corner("star")])
@pytest.mark.parametrize("world_size", [3])
def test_convolutions_on_workers_without_nodes_or_edges(pool, world_size, scenario):
    parts = SCENARIOS[scenario](world_size)
    for dtype in (torch.float32, torch.float64):
        names = [name for name in CONVS if precision_of(name) == dtype]
        names = [name for name in names if not among(NEEDS_IN_EDGES, name) and name not in NEEDS_THREE_SOURCES]
        check(pool, parts, random_data(parts, dtype), [(conv_gradients, (name,)) for name in names], (1,), timeout=200)


@pytest.mark.parametrize("world_size", [2])
def test_reversible_layer_on_a_worker_with_one_node(pool, world_size):
    """The slices that kernels then read of its output are not copies."""
    parts = SCENARIOS["one node"](world_size)
    cases = [(conv_gradients, (name,)) for name in CONVS if layer_of(name) == "GroupRevRes"]
    check(pool, parts, random_data(parts, torch.float64), cases)


@pytest.mark.parametrize("world_size", [2])
def test_python_functions_in_many_tiles(pool, world_size):
    parts = with_in_edges(world_size)
    names = ("NNConv max", "PNAConv", "HGTConv", "EGNNConv edge_feat", "SAGEConv lstm", "EdgeWeightNorm both")
    cases = [(conv_gradients, (name,)) for name in names]
    settings = {"comm_buffer_bytes": 1000, "pipeline_depth": 2}
    check(pool, parts, random_data(parts, torch.float64), cases, (1, 2), settings, timeout=120)


def twice_of(forward, x):
    return 2 * forward(x)


CHANGES = {
    "forward hook": lambda module: module.register_forward_hook(lambda layer, given, made: made.sin()),
    "forward pre-hook": lambda module: module.register_forward_pre_hook(lambda layer, given: given[0].cos()),
    "backward hook": lambda module: module.register_full_backward_hook(lambda layer, into, out: (2 * into[0],)),
    "backward pre-hook": lambda module: module.register_full_backward_pre_hook(lambda layer, out: (2 * out[0],)),
    "global hook": lambda module: register_module_forward_hook(
        lambda layer, given, made: made.sin() if layer is module else None
    ),
    "replaced forward": lambda module: setattr(module, "forward", partial(twice_of, module.forward)),
}
"""Of a module, which then is not what its attributes say."""

OTHER_LINEAR = {
    "spectral_norm": torch.nn.utils.spectral_norm,
    "parametrization": torch.nn.utils.parametrizations.weight_norm,
}


class Steep(nn.LeakyReLU):
    def forward(self, x):
        return 3 * super().forward(x)


class NamedNorm(nn.BatchNorm1d):
    pass


class ScaledNorm(nn.BatchNorm1d):
    def forward(self, x):
        return 3 * super().forward(x)


def converted_norms(layer):
    layer.eval()
    if dist.is_initialized():
        sar.convert_batchnorm(layer)


def hook_of_norms(layer):
    for tower in layer.eval().towers:
        tower.batchnorm.register_forward_hook(lambda norm, given, made: 2 * made)


def hook_of_all_messages(layer):
    layer.linears[0].register_forward_hook(lambda linear, given, made: made - made.mean(0))


ATTENTION, TOWERS, NORMALISING = ("GATConv", "GATv2Conv"), ("PNAConv", "DGNConv"), ("EdgeConv batch_norm",)
OTHER_LAYERS = {
    "dropout in evaluation": (ATTENTION, lambda layer: layer.attn_drop.__dict__.update(p=0.5, training=False)),
    "dropout of all": (ATTENTION, lambda layer: setattr(layer.attn_drop, "p", 1.0)),
    "no dropout": (ATTENTION, lambda layer: setattr(layer, "attn_drop", nn.Threshold(0.1, 0.0))),
    "no leaky_relu": (ATTENTION, lambda layer: setattr(layer, "leaky_relu", nn.ELU())),
    "steep": (ATTENTION, lambda layer: setattr(layer, "leaky_relu", Steep(0.1))),
    "other slope": (ATTENTION, lambda layer: setattr(layer.leaky_relu, "negative_slope", 0.7)),
    "not shared": (
        ("GATv2Conv residual, share_weights",),
        lambda layer: setattr(layer, "fc_dst", nn.Linear(IN, 6).double()),
    ),
    "converted": (TOWERS, converted_norms),
    "hook": (TOWERS, hook_of_norms),
    "lazy": (NORMALISING, lambda layer: setattr(layer, "bn", nn.LazyBatchNorm1d(dtype=torch.float64))),
    "inherited": (NORMALISING, lambda layer: setattr(layer, "bn", NamedNorm(OUT).double())),
    "scaled": (NORMALISING, lambda layer: setattr(layer, "bn", ScaledNorm(OUT).double().eval())),
    "messages centred": (("GatedGraphConv etypes",), hook_of_all_messages),
}
"""Layers, and what is changed in them."""


def with_change(graph, data, name, how, module=None):
    """A layer that does something more than its attributes say, or whose attributes have changed."""
    if dist.is_initialized():
        sar.patch_dgl()
    layer, x = CONVS[name].make().double(), data.leaf("x")
    if module == "fc" and not hasattr(layer, "fc"):
        module = "fc_src"
    if module is None:
        OTHER_LAYERS[how][1](layer)
    else:
        handle = (CHANGES | OTHER_LINEAR)[how](getattr(layer, module))
    results = gradients(CONVS[name].run(layer, graph, x, data.edges["w"], data), data, layer, x=x)
    if how == "global hook":
        handle.remove()
    return results


def calls_differ(graph, data, name):
    """Whether two calls of a layer in evaluation differ whose dropout is in training, as for Monte-Carlo dropout."""
    if dist.is_initialized():
        sar.patch_dgl()
    layer, x = CONVS[name].make().double().eval(), data.nodes["x"]
    layer.attn_drop.train().p = 0.5
    return {"same differ": ((layer(graph, x) - layer(graph, x)).abs().max() > 0.01).double()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_layers_whose_modules_have_changed(pool, world_size):
    """Only where a module is sure to be a known function is it computed elsewhere, or once more in the backward."""
    parts = with_in_edges(world_size)
    of_modules = [
        *[(name, how, "fc") for name in ("GATConv", "GATv2Conv", "DotGatConv") for how in CHANGES | OTHER_LINEAR],
        *[(name, how, each) for name in ATTENTION for each in ("attn_drop", "leaky_relu") for how in CHANGES],
        *[(name, how) for how, (names, _) in OTHER_LAYERS.items() for name in names],
    ]
    if world_size > 1:
        of_modules.remove(("GatedGraphConv etypes", "messages centred"))  # whose hook looks at all edges
    cases = [(with_change, case) for case in of_modules] + [(calls_differ, (name,)) for name in ATTENTION]
    check(pool, parts, random_data(parts, torch.float64), cases, (1, 3), timeout=200)


def with_scaled_norm(mine):
    sar.patch_dgl()
    graph, layer = sar.construct_full_graph(mine), CONVS["EdgeConv batch_norm"].make()
    layer.bn = ScaledNorm(OUT)
    layer(graph, torch.ones(graph.num_nodes(), IN))


@pytest.mark.parametrize("world_size", [2])
def test_a_norm_with_a_forward_of_its_own_is_refused_in_training(pool, world_size):
    for failure in pool.outcomes(with_scaled_norm, per_rank=with_in_edges(world_size).partitions):
        assert (failure.kind, failure.message[:13]) == ("GraphError", "ScaledNorm(4,")


def test_rel_graph_conv_is_dgls():
    assert sar.RelGraphConv is dglnn.RelGraphConv


def test_every_convolution_is_here():
    exported = [name for name in dglnn.conv.__all__ if not name.startswith(("Dense", "CuGraph"))]
    assert set(exported) <= {layer_of(name) for name in REGISTRY}
