"""Graphs and what hangs on them are free as soon as nobody holds them, without Python's garbage collector.

It runs seldom where few objects are made, and does not know how large tensors are, on GPUs least of all.
"""

import gc
from collections import Counter

import dgl
import dgl.function as fn
import dgl.nn.pytorch as dglnn
import pytest
import torch
import torch_geometric.nn as pyg

import sar
import sar.pyg
from tests.matrix import corner
from tests.parity.conv_layers import conv_gradients
from tests.parity.harness import build, random_shares, weighted_sum
from tests.parity.programs import LAYERS


def layers(graph, data):
    """Built-in and Python functions, with results that stay in the graph's frames, and backwards."""
    for layer in LAYERS.values():
        x, w = data.leaf("x"), data.leaf("w")
        graph.ndata["out"] = layer(graph, x, w)
        graph.ndata["sum"] = graph.ndata["out"] + x
        weighted_sum(graph.ndata["sum"], data.nodes["cotangent"]).backward()


def no_backward(graph, data):
    """The autograd nodes of results that stay in the frames go with the graph."""
    graph.ndata["x"], graph.edata["w"] = data.leaf("x"), data.leaf("w")
    graph.update_all(lambda edges: {"m": edges.src["x"] * edges.data["w"]}, fn.sum("m", "sum"))
    graph.update_all(fn.u_mul_e("x", "w", "m"), lambda nodes: {"product": nodes.mailbox["m"].prod(1)})
    graph.apply_edges(lambda edges: {"score": edges.src["x"] * edges.dst["x"]})
    graph.apply_edges(fn.u_dot_v("x", "x", "dot"))
    graph.edata["softmax"] = sar.edge_softmax(graph, graph.edata["dot"])
    graph.ndata["fetched"] = sar.fetch_rows(graph, graph.ndata["x"], graph.node_ids())


def convolutions(graph, data):
    for name in ("GATConv", "GATv2Conv", "DotGatConv", "SAGEConv lstm", "EdgeConv", "NNConv max", "HGTConv"):
        conv_gradients(graph, data, name)


def other_graphs(graph, data):
    """Graphs made of the graph, and what it makes once and keeps."""
    for made in (graph.add_self_loop(), graph.remove_self_loop(), graph.get_full_partition_graph(), graph.local_var()):
        made.ndata["x"] = data.leaf("x")
        made.update_all(fn.copy_u("x", "m"), fn.mean("m", "out"))
        assert made.in_degrees().sum() + made.out_degrees().sum() >= 0
        assert made.sampling_graph.num_nodes() > 0


def message_flow_graphs(graph, data):
    for block in sar.construct_mfgs(data.partition, torch.arange(0, graph.num_nodes(), 3) + graph.node_ids()[0], 2):
        block.srcdata["x"] = data.leaf("x")[block.input_nodes]
        block.update_all(lambda edges: {"m": edges.src["x"].tanh()}, fn.sum("m", "out"))


def mini_batches(graph, data):
    embedding = sar.nn.DistEmbedding(graph, 4)
    sampler = sar.DistNeighborSampler([2, 2], input_node_features={"x": data.nodes["x"]})
    layer = dglnn.SAGEConv(4, 4, "pool").double()
    for blocks in sar.DataLoader(graph, graph.node_ids(), sampler, batch_size=10, shuffle=True):
        out = embedding(blocks[0].srcdata[dgl.NID]).double()
        for block in blocks:
            out = block.dstdata["out"] = layer(block, out)
        out.sum().backward()
    embedding.sum_gradients()


def edge_index(graph, data):
    edges = sar.pyg.edge_index(graph)
    for layer in (pyg.GCNConv(6, 4), pyg.GATConv(6, 4), pyg.EdgeConv(torch.nn.Linear(12, 4)), pyg.SAGEConv(6, 4)):
        x = data.leaf("x")
        layer.double()(x, edges).sum().backward()
        layer(x, edges.reversed)


PROGRAMS = (layers, no_backward, convolutions, other_graphs, message_flow_graphs, mini_batches, edge_index)


def in_cycles(mine, mode, programs):
    """What only the garbage collector frees after each program and its graph, by program."""
    partition, data = mine
    data.partition = partition
    found = {}
    gc.freeze()  # what is there already, which takes a second to look through
    for program in programs:
        for once_more in (False, True):  # what is kept for good is made by then
            gc.collect()
            gc.disable()
            program(build(partition, mode), data)
            gc.set_debug(gc.DEBUG_SAVEALL if once_more else 0)
            try:
                gc.collect()
                ours = [each for each in gc.garbage if type(each).__module__.partition(".")[0] in ("sar", "torch")]
                found[program.__name__] = dict(Counter(type(each).__qualname__ for each in ours))
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
                gc.enable()
    gc.unfreeze()
    return found


@pytest.mark.processes("looks at the garbage of a process")
@pytest.mark.parametrize("world_size", [corner(1), 2])
def test_nothing_waits_for_the_garbage_collector(pool, world_size):
    mine = random_shares(world_size, torch.float64)
    for mode, programs in ((1, PROGRAMS), (3, PROGRAMS[:2])):
        for found in pool.run(in_cycles, mode, programs, per_rank=mine, timeout=120):
            assert found == {program.__name__: {} for program in programs}
