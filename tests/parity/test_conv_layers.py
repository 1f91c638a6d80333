"""Every convolution of DGL on the distributed graph: outputs and all gradients equal single-machine DGL."""

import dgl.nn.pytorch as dglnn
import pytest
import torch
import torch.distributed as dist

import sar
from tests.graphs import EdgeList, PartitionedGraph, partition_in_memory, random_graph
from tests.parity.conv_layers import CONVS, IN, OUT, conv_gradients, edge_types
from tests.parity.harness import check, parameter_gradients, random_data, weighted_sum
from tests.parity.scenarios import SCENARIOS, scattered

# DGL's own layer mixes float32 into other precisions, or refuses nodes without in-edges.
SINGLE_PRECISION_ONLY = ("APPNPConv", "APPNPConv weighted", "TWIRLSConv", "TWIRLSConv attention")
# It takes an input without rows for one that it has freed, and then skips its backward.
NEEDS_NODES = ("GroupRevRes",)
BATCH_STATISTICS = ("EdgeConv batch_norm",)


def patched(graph, data, name):
    if dist.is_initialized():  # on a worker; the single-machine reference is DGL as it is
        sar.patch_dgl()
    return conv_gradients(graph, data, name)


def with_in_edges(workers: int) -> PartitionedGraph:
    """A random graph in which every node has a self-loop."""
    graph, loops = random_graph(8, 30, 150), torch.arange(30)
    edges = EdgeList(torch.cat([graph.src, loops]), torch.cat([graph.dst, loops]), 30)
    return partition_in_memory(edges, scattered(30, workers), workers)


@pytest.mark.parametrize("modes", [(1,), (2, 3)], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_convolutions(pool, world_size, modes):
    parts = with_in_edges(world_size)
    cases = [(patched, (name,)) for name in CONVS if name not in SINGLE_PRECISION_ONLY]
    check(pool, parts, random_data(parts, torch.float64), cases, modes, timeout=200)


@pytest.mark.parametrize("world_size", [2, 3])
def test_convolutions_in_single_precision(pool, world_size):
    parts = with_in_edges(world_size)
    check(pool, parts, random_data(parts), [(patched, (name,)) for name in SINGLE_PRECISION_ONLY])


@pytest.mark.parametrize("scenario", ["first worker without nodes", "star"])
@pytest.mark.parametrize("world_size", [3])
def test_convolutions_on_workers_without_nodes_or_edges(pool, world_size, scenario):
    parts = SCENARIOS[scenario](world_size)
    left_out = (*SINGLE_PRECISION_ONLY, *NEEDS_NODES, *BATCH_STATISTICS)
    names = [name for name in CONVS if name not in left_out and not name.startswith("EGAT")]
    check(pool, parts, random_data(parts, torch.float64), [(patched, (name,)) for name in names], (1,), timeout=200)


@pytest.mark.parametrize("world_size", [2])
def test_python_functions_in_many_tiles(pool, world_size):
    parts = with_in_edges(world_size)
    names = ("NNConv max", "PNAConv edges", "HGTConv", "EGNNConv", "SAGEConv lstm", "EdgeWeightNorm both")
    cases = [(patched, (name,)) for name in names]
    settings = {"comm_buffer_bytes": 1000, "pipeline_depth": 2}
    check(pool, parts, random_data(parts, torch.float64), cases, (1, 2), settings, timeout=120)


def with_state(graph, data, state):
    """`sar.RelGraphConv` on workers, DGL's on one machine, both with the same parameters."""
    conv = sar.RelGraphConv if dist.is_initialized() else dglnn.RelGraphConv
    layer = conv(IN, OUT, 3, regularizer="basis", num_bases=2, layer_norm=True).double()
    layer.load_state_dict(state)
    x = data.leaf("x")
    out = layer(graph, x, edge_types(data))
    weighted_sum(out, data.nodes["cotangent"]).backward()
    return {"node out": out, "node x.grad": x.grad, **parameter_gradients(layer)}


@pytest.mark.parametrize("world_size", [2])
def test_rel_graph_conv_is_dgls(pool, world_size):
    torch.manual_seed(12)
    layer = dglnn.RelGraphConv(IN, OUT, 3, regularizer="basis", num_bases=2, layer_norm=True).double()
    assert isinstance(layer, sar.RelGraphConv)
    parts = with_in_edges(world_size)
    check(pool, parts, random_data(parts, torch.float64), [(with_state, (layer.state_dict(),))])
