"""What outlives a call is made of ordinary tensors in any mode of the caller, so training works after validation."""

import gc

import dgl.function as fn
import dgl.nn as dglnn
import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import sar
from tests.parity.harness import MODES, build, deal, random_data
from tests.parity.scenarios import SCENARIOS


def passed(message, reduce):
    def run(graph, _, x):
        with graph.local_scope():
            graph.ndata["h"], graph.edata["w"] = x, torch.ones(graph.num_edges(), 1)
            graph.update_all(message, reduce)
            return graph.ndata["out"]

    return run


def layer(make, learned=False):
    def run(graph, _, x):
        torch.manual_seed(0)
        conv, given = make(), graph
        if isinstance(conv, pyg.MessagePassing | pyg.DirGNNConv):
            given = graph.__dict__.setdefault("edges of the test", sar.pyg.edge_index(graph))
        weights = (torch.ones(1, requires_grad=True).expand(given.size(1)),) if learned else ()
        return conv(x, given, *weights) if given is not graph else conv(graph, x)

    return run


def changed(graph, _, x):
    """On graphs that are made of the graph, the first time."""
    if "changed" not in graph.__dict__:
        pairs = sar.pair_graph(graph, graph.node_ids(), graph.node_ids().flip(0))
        looped = graph.remove_self_loop().add_self_loop()
        graph.__dict__["changed"] = [pairs, looped, graph.get_full_partition_graph()]
    assert graph.sampling_graph.num_edges() == graph.num_edges()
    return sum(passed(fn.u_mul_e("h", "w", "m"), fn.mean("m", "out"))(each, _, x) for each in graph.__dict__["changed"])


def flow(graph, partition, x):
    if "flow" not in graph.__dict__:
        graph.__dict__["flow"] = sar.construct_mfgs(partition, graph.node_ids()[::2], 1)[0]
    block = graph.__dict__["flow"]
    block.srcdata["h"] = x[block.input_nodes]
    block.update_all(fn.copy_u("h", "m"), lambda nodes: {"out": nodes.mailbox["m"].sum(1)})
    return block.dstdata.pop("out") + 0 * block.srcdata.pop("h").sum()


def softened(graph, _, x):
    graph.apply_edges(lambda edges: {"s": edges.data["_ID"].unsqueeze(1) * 0.01})
    return passed(fn.u_mul_e("h", "a", "m"), fn.sum("m", "out"))(with_softmax(graph), _, x)


def with_softmax(graph):
    graph.edata["a"] = sar.edge_softmax(graph, graph.edata.pop("s"))
    return graph


PATHS = {
    "sum": passed(fn.u_mul_e("h", "w", "m"), fn.sum("m", "out")),
    "mean": passed(fn.copy_u("h", "m"), fn.mean("m", "out")),
    "max": passed(fn.copy_u("h", "m"), fn.max("m", "out")),
    "message": passed(lambda edges: {"m": edges.src["h"] * edges.dst["h"]}, fn.mean("m", "out")),
    "reduce": passed(fn.copy_u("h", "m"), lambda nodes: {"out": nodes.mailbox["m"].sum(1)}),
    "softmax": softened,
    "changed graphs": changed,
    "flow graph": flow,
    "GraphConv": layer(lambda: dglnn.GraphConv(6, 4, allow_zero_in_degree=True)),
    "GATConv": layer(lambda: dglnn.GATConv(6, 4, 2, allow_zero_in_degree=True)),
    "EGConv": layer(lambda: pyg.EGConv(6, 8, num_heads=2)),
    "learned weights": layer(lambda: pyg.GCNConv(6, 4), learned=True),
    "both ways": layer(lambda: pyg.DirGNNConv(pyg.SAGEConv(6, 4))),
}


def trained(graph, partition, x, path):
    x = x.clone().requires_grad_()
    out = PATHS[path](graph, partition, x)
    out.square().sum().backward()
    return x.grad


def left_over():
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    return [tuple(each.shape) for each in tensors if each.is_inference()]


def after(mine, modes):
    """Gradients after each path has been run in inference mode, on a graph that was made there, too; and without."""
    partition, data = mine
    x = data.nodes["x"]
    for mode in modes:
        expected = {path: trained(build(partition, mode), partition, x, path) for path in PATHS}
        before = {path: build(partition, mode) for path in PATHS}
        with torch.inference_mode():
            inside = {path: build(partition, mode) for path in PATHS}
            for graphs in (before, inside):
                for path, graph in graphs.items():
                    PATHS[path](graph, partition, x)
                    graph.edata.pop("a", None)
        assert not left_over(), mode
        for graphs in (before, inside):
            for path, graph in graphs.items():
                assert torch.equal(trained(graph, partition, x, path), expected[path]), (path, mode)


@pytest.mark.parametrize("world_size, modes", [(1, (1,)), (2, MODES)])
def test_training_after_inference_mode(pool, world_size, modes):
    parts = SCENARIOS["isolated"](world_size)
    pool.run(after, modes, per_rank=deal(parts, random_data(parts)), timeout=100)
