"""`save_model`: what sar has trained loads in plain DGL, PyTorch Geometric and torch, and computes the same there."""

import dgl
import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sar
from tests.core.attempts import catch_and_recover, require
from tests.graphs import partition_in_memory, random_graph

EDGES = random_graph(0, 30, 200)


class InDGL(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = dgl.nn.GATConv(5, 4, 2)
        self.norm = nn.BatchNorm1d(8)
        self.out = dgl.nn.SAGEConv(8, 3, "mean")

    def forward(self, graph, x):
        return self.out(graph, self.norm(self.conv(graph, x).flatten(1)).relu())


class InPyG(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = pyg.GATConv(5, 4, heads=2)
        self.norm = pyg.BatchNorm(8)
        self.other = pyg.GraphNorm(8)
        self.out = pyg.GCNConv(8, 3)

    def forward(self, edges, x):
        return self.out(self.other(self.norm(self.conv(x, edges))).relu(), edges)


def wrapped(model):
    """As DDP, with a sum of gradients."""
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, sar.ddp_sum_hook)
    return ddp


def train(partition, path, kind, wrap):
    """A step, and what the model then says of this worker's nodes."""
    torch.manual_seed(0)
    graph = sar.construct_full_graph(partition)
    model = sar.convert_batchnorm(InDGL()) if kind == "dgl" else sar.convert_batchnorm(InPyG())
    sar.sync_params(model)
    edges = graph if kind == "dgl" else sar.pyg.edge_index(graph)
    used = wrapped(model) if wrap else model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    used(edges, partition["feat"]).square().sum().backward()
    if not wrap:
        sar.gather_grads(model)
    optimizer.step()
    sar.save_model(path, torch.compile(used) if wrap == "compiled" else used)
    with torch.no_grad():
        return model.eval()(edges, partition["feat"])


@pytest.mark.parametrize(
    "kind, wrap",
    [
        ("dgl", None),
        ("pyg", None),
        pytest.param("dgl", "DDP", marks=pytest.mark.processes("DDP is for processes")),
        pytest.param("pyg", "compiled", marks=[pytest.mark.slow, pytest.mark.processes("DDP is for processes")]),
    ],
)
@pytest.mark.parametrize("world_size", [2])
def test_it_loads_in_the_plain_model(pool, tmp_path, kind, wrap):
    x = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    assignment = torch.arange(30) % 2
    parts = partition_in_memory(EDGES, assignment, 2, node_features={"feat": x}).partitions
    path = tmp_path / "made" / "model.pt"
    found = pool.run(train, path, kind, wrap, per_rank=parts)
    plain = InDGL() if kind == "dgl" else InPyG()
    plain.load_state_dict(torch.load(path, weights_only=True))
    edges = dgl.graph((EDGES.src, EDGES.dst), num_nodes=30) if kind == "dgl" else torch.stack([EDGES.src, EDGES.dst])
    with torch.no_grad():
        logits = plain.eval()(edges, x)
    rows = torch.cat([(assignment == part).nonzero().squeeze(1) for part in range(2)])
    torch.testing.assert_close(torch.cat(found), logits[rows])
    assert [file.name for file in path.parent.iterdir()] == ["model.pt"]


def save_others(folder):
    """A piece of a large tensor; a folder that cannot be made, and a model that differs, which leave nothing."""
    model = nn.Linear(2, 2)
    sar.sync_params(model)
    model.register_buffer("piece", torch.zeros(10**6)[: 2 + sar.rank()])  # buffers may differ
    sar.save_model(folder / "model.pt", model)
    (folder / "file").touch()
    unwritten = require(catch_and_recover(lambda: sar.save_model(folder / "file" / "model.pt", model)))
    with torch.no_grad():
        model.bias += sar.rank()
    return unwritten.message, require(catch_and_recover(lambda: sar.save_model(folder / "model.pt", model))).message


@pytest.mark.parametrize("world_size", [2])
def test_what_cannot_be_saved(pool, tmp_path):
    for unwritten, differs in pool.run(save_others, tmp_path):
        assert "Nothing was saved to" in unwritten
        assert "model.bias differs between workers" in differs
    assert (tmp_path / "model.pt").stat().st_size < 10_000
    assert torch.load(tmp_path / "model.pt", weights_only=True)["piece"].tolist() == [0, 0]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "model.pt"]
