"""One partitioning, any number of workers: mini-batches and embeddings equal DGL on the whole graph."""

import dgl
import dgl.nn.pytorch as dglnn
import pytest
import torch

import sar
from tests.adapters.dgl.directories import homogeneous_graph, write_directory
from tests.parity.harness import assert_close

WIDTH, OUT = 4, 3


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


def layer():
    torch.manual_seed(3)
    return dglnn.SAGEConv(WIDTH, OUT, "mean").double()


def mini_batches_on_worker(path):
    data = sar.load_dgl_partition_data(path, sar.rank(), "cpu")
    graph = sar.construct_full_graph(data)
    emb = sar.nn.DistEmbedding(graph, WIDTH, init_func=lambda shape, dtype: data.node_features["_N/x"].clone())
    sampler = sar.DistNeighborSampler([-1], output_node_features={"cotangent": data.node_features["_N/cotangent"]})
    sage = layer()
    found = []
    for (block,) in sar.DataLoader(graph, graph.node_ids(), sampler, batch_size=7):
        out = sage(block, emb(block.srcdata[dgl.NID]), block.edata["w"])
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
    out = layer()(graph, x, graph.edata["w"])
    (out * graph.ndata["cotangent"]).sum().backward()
    original = directory.node_ids["_N"]
    by_worker = pool.run(mini_batches_on_worker, str(directory.path))
    for found, ids, grads in by_worker:
        assert_close(grads, x.grad[original[ids]], 1e-9)
        for nodes, rows in found:
            assert_close(rows, out.detach()[original[nodes]], 1e-9)
    assert sum(len(nodes) for found, _, _ in by_worker for nodes, _ in found) == graph.num_nodes()
