"""One partitioning, any number of workers: layers, mini-batches and embeddings equal DGL on the whole graph."""

import dgl
import dgl.function as fn
import dgl.nn.pytorch as dglnn
import pytest
import torch
from torch import nn

import sar
from tests.adapters.dgl.directories import homogeneous_graph, write_directory
from tests.matrix import corner
from tests.parity.harness import assert_close

WIDTH, OUT = 4, 3


class Model(nn.Module):
    """Weighted means, attention, and a maximum."""

    def __init__(self):
        super().__init__()
        self.sage = dglnn.SAGEConv(WIDTH, OUT, "mean")
        self.gat = dglnn.GATConv(OUT, OUT, 2, allow_zero_in_degree=True)

    def forward(self, graph, x):
        hidden = self.sage(graph, x, graph.edata["w"]).tanh()
        hidden = self.gat(graph, hidden).mean(1)
        with graph.local_scope():
            graph.ndata["h"] = hidden
            graph.update_all(fn.copy_u("h", "m"), fn.max("m", "h"))
            return graph.ndata["h"] + hidden


def numbers(count, *shape, seed):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole_graph():
    graph = homogeneous_graph()
    for frame in (graph.ndata, graph.edata):
        for key in list(frame):
            frame.pop(key)
    graph.ndata["x"], graph.ndata["cotangent"] = (numbers(graph.num_nodes(), n, seed=n) for n in (WIDTH, OUT))
    graph.edata["w"] = numbers(graph.num_edges(), seed=9).abs() + 0.5
    return graph


def run(model, graph, x, cotangent):
    x = x.clone().requires_grad_()
    out = model(graph, x)
    (out * cotangent).sum().backward()
    return out.detach(), x.grad


def made():
    torch.manual_seed(3)
    return Model().double()


def on_worker(path, mode):
    sar.patch_dgl()
    sar.Config.disable_sr = mode == 2
    data = sar.load_dgl_partition_data(path, sar.rank(), "cpu")
    graph = sar.construct_full_graph(data)
    if mode == 3:
        graph = graph.get_full_partition_graph()
    model = made()
    results = run(model, graph, data.node_features["_N/x"], data.node_features["_N/cotangent"])
    sar.gather_grads(model)
    return data.node_features["_ID"], results, [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    "method, num_parts, world_size",
    [
        ("metis", 1, 3),
        ("random", 5, 2),
        ("metis", 8, 3),
        ("random", 4, 1),
        *(corner(method, *counts) for method in ("metis", "random") for counts in ((3, 4), (1, 3), (5, 2))),
    ],
)
def test_layers(pool, tmp_path, method, num_parts, world_size):
    graph = whole_graph()
    directory = write_directory(tmp_path, graph, num_parts, method)
    model = made()
    out, grad = run(model, graph, graph.ndata["x"], graph.ndata["cotangent"])
    original = directory.node_ids["_N"]
    for mode in (1, 2, 3):
        by_worker = pool.run(on_worker, str(directory.path), mode)
        ids = torch.cat([ids for ids, _, _ in by_worker])
        assert ids.tolist() == list(range(graph.num_nodes()))
        for k, expected in enumerate((out, grad)):
            assert_close(torch.cat([results[k] for _, results, _ in by_worker]), expected[original], 1e-9)
        for _, _, parameters in by_worker:
            for mine, expected in zip(parameters, model.parameters(), strict=True):
                assert_close(mine, expected.grad, 1e-9)


def mini_batches_on_worker(path):
    data = sar.load_dgl_partition_data(path, sar.rank(), "cpu")
    graph = sar.construct_full_graph(data)
    emb = sar.nn.DistEmbedding(graph, WIDTH, init_func=lambda shape, dtype: data.node_features["_N/x"].clone())
    sampler = sar.DistNeighborSampler([-1], output_node_features={"cotangent": data.node_features["_N/cotangent"]})
    layer = made().sage
    found = []
    for (block,) in sar.DataLoader(graph, graph.node_ids(), sampler, batch_size=7):
        out = layer(block, emb(block.srcdata[dgl.NID]), block.edata["w"])
        (out * block.dstdata["cotangent"]).sum().backward()
        found.append((block.dstdata[dgl.NID], out.detach()))
    used, grads = emb.sum_gradients()
    rows = torch.zeros_like(emb.weight).index_copy_(0, used, grads)
    return found, data.node_features["_ID"], rows


@pytest.mark.parametrize("num_parts, world_size", [(5, 2), (1, 3)])
def test_mini_batches_and_embeddings(pool, tmp_path, num_parts, world_size):
    graph = whole_graph()
    directory = write_directory(tmp_path, graph, num_parts)
    x = graph.ndata["x"].clone().requires_grad_()
    out = made().sage(graph, x, graph.edata["w"])
    (out * graph.ndata["cotangent"]).sum().backward()
    original = directory.node_ids["_N"]
    by_worker = pool.run(mini_batches_on_worker, str(directory.path))
    for found, ids, grads in by_worker:
        assert_close(grads, x.grad[original[ids]], 1e-9)
        for nodes, rows in found:
            assert_close(rows, out.detach()[original[nodes]], 1e-9)
    assert sum(len(nodes) for found, _, _ in by_worker for nodes, _ in found) == graph.num_nodes()
