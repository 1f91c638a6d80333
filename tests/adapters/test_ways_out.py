"""Refusals that name a way out, and the ways that they name, which give the numbers of one machine."""

import io
import re
from copy import copy, deepcopy

import dgl
import pytest
import torch
import torch_geometric.loader as loaders
from torch import nn
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn import GCN
from torch_geometric.utils import scatter

import sar
from sar.errors import FieldError, GraphError, MissingMethodError
from tests.graphs import random_graph


def make_graph():
    edges, generator = random_graph(2, 40, 200), torch.Generator().manual_seed(0)
    graph = dgl.graph((edges.src, edges.dst), num_nodes=40)
    graph.ndata["x"] = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    return graph


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("parts"))
    sar.partition_graph(make_graph(), "graph", 2, folder, part_method="random")
    return folder


def refused(kind, words, call, *args, **kwargs):
    with pytest.raises(kind, match=re.escape(words)):
        call(*args, **kwargs)
    sar.recover()


def add_up(values, numbers, count):
    """As EGNN's layers add up messages."""
    numbers = numbers.unsqueeze(-1).expand(-1, values.size(1))
    return values.new_zeros(count, values.size(1)).scatter_add_(0, numbers, values)


def follow_the_advice(directory):
    data = sar.pyg.load_partition(directory)
    graph, (row, col) = data.graph, data.edge_index
    refused(GraphError, "torch_geometric.utils.scatter(values, edge_index[0]", add_up, data.x[col], row, len(data.x))
    by_row = scatter(data.x[col], row, 0, len(data.x))
    refused(GraphError, "sar.pyg.global_add_pool(x, batch)", add_up, data.x, data.batch, 1)
    pooled = sar.pyg.global_add_pool(data.x, data.batch)
    for kind, options in (
        (loaders.NeighborLoader, {"num_neighbors": [2]}),
        (loaders.RandomNodeLoader, {"num_parts": 2}),
    ):
        refused(GraphError, f"{kind.__name__} was called with a distributed", kind, data, **options)
    refused(GraphError, "sar.DataLoader with sar.DistNeighborSampler", loaders.ClusterData, data, 2)
    model = {"mode": "regression", "task_level": "node", "return_type": "raw"}
    explainer = Explainer(
        GCN(3, 4, 1, 1).double(), GNNExplainer(epochs=1), "model", edge_mask_type="object", model_config=model
    )
    refused(GraphError, "Explain batches of sar.DataLoader", explainer, data.x, data.edge_index)
    sampler = sar.DistNeighborSampler([-1, -1], input_node_features={"x": data.x})
    batch = next(iter(sar.DataLoader(graph, graph.node_ids(), sampler, 4, format="pyg")))
    assert len(explainer(batch.x, batch.edge_index, index=0).edge_mask) == batch.num_edges

    refused(MissingMethodError, "sar.pair_graph with the global IDs", dgl.DropEdge(0.5), graph)
    known = graph.sampling_graph
    src, dst = (known.ndata["_ID"][ends] for ends in known.edges())
    kept = src % 3 > 0
    dropped = sar.pair_graph(graph, src[kept], dst[kept])
    dropped.ndata["x"] = data.x
    dropped.update_all(dgl.function.copy_u("x", "m"), dgl.function.sum("m", "out"))

    model = nn.Linear(2, 2)
    model.graph, model.edges = graph, data.edge_index
    for value in (model, graph, data, data.batch):
        refused(GraphError, "cannot be saved. Save model.state_dict()", torch.save, value, io.BytesIO())
        deepcopy(value)
    torch.save(model.state_dict(), io.BytesIO())
    other = copy(graph)
    assert other.num_edges() == graph.num_edges()
    refused(FieldError, "sar.Task(labels, {'train': mask})", sar.Task.of, data)
    assert sar.Task(torch.ones(len(data.x)).long(), {"train": data.x[:, 0] > 0}).num_classes == 2
    everywhere = torch.cat(sar.comm.exchange_tensors([graph.node_ids()] * 2))
    originals = torch.cat(sar.comm.exchange_tensors([data.orig_id] * 2))[everywhere.argsort()]
    return data.orig_id, by_row, pooled, originals, dropped.dstdata["out"]


@pytest.mark.parametrize("world_size", [2])
def test_the_way_out_is_right(pool, world_size, directory):
    graph = make_graph()
    (row, col), x = graph.edges(), graph.ndata["x"]
    for ids, by_row, pooled, originals, after_dropping in pool.run(follow_the_advice, directory):
        torch.testing.assert_close(by_row, add_up(x[col], row, 40)[ids])
        torch.testing.assert_close(pooled, x.sum(0, keepdim=True))
        number = originals.argsort()  # the global IDs of nodes
        kept = number[row] % 3 > 0
        torch.testing.assert_close(after_dropping, add_up(x[row[kept]], col[kept], 40)[ids])
