"""The diffs of README and of the page on DGL: the new side on two workers trains as the old side on one process."""

import os
import re
from contextlib import redirect_stdout
from io import StringIO

import dgl.function as fn
import pytest
import torch
from dgl.nn import EdgeConv, EdgeWeightNorm, GraphConv
from dgl.nn.functional import edge_softmax
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, GraphNorm, SAGEConv

import sar
from tests.pages.blocks import new_side, old_side
from tests.pages.files import small_graph
from tests.workers import REPOSITORY

PAGES = {"pyg": "README.md", "dgl": "docs/howto/from-dgl.md"}
EPOCHS = "range(100)", "range(5)"


def my_graph():
    graph = small_graph()
    graph.ndata["feat"] = graph.ndata["feat"].double()
    graph.edata["w"] = graph.edata["w"].double() + 0.1
    return graph


class DGLModel(torch.nn.Module):
    """Normalised edge weights, the user's batch normalisation and a layer's, and `edge_softmax` as imported here."""

    def __init__(self):
        super().__init__()
        self.weights, self.first, self.norm = EdgeWeightNorm(), GraphConv(12, 16), torch.nn.BatchNorm1d(16)
        self.key, self.value = torch.nn.Linear(16, 1), EdgeConv(16, 4, batch_norm=True)

    def forward(self, graph, x):
        h = self.norm(self.first(graph, x, edge_weight=self.weights(graph, graph.edata["w"]))).relu()
        with graph.local_scope():
            graph.ndata.update(key=self.key(h), value=self.value(graph, h))
            graph.apply_edges(fn.u_mul_v("key", "key", "score"))
            graph.edata["weight"] = edge_softmax(graph, graph.edata["score"])
            graph.update_all(fn.u_mul_e("value", "weight", "m"), fn.sum("m", "out"))
            return graph.ndata["out"]


class PyGModel(torch.nn.Module):
    """Wider and narrower layers, attention, and norm layers of torch and of PyTorch Geometric."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = GCNConv(12, 16), torch.nn.BatchNorm1d(16)
        self.second, self.graph_norm = GATConv(16, 4, heads=2), GraphNorm(8)
        self.last = SAGEConv(8, 4)

    def forward(self, x, edge_index):
        h = self.norm(self.first(x, edge_index)).relu()
        return self.last(self.graph_norm(self.second(h, edge_index)).relu(), edge_index)


def train(code, library, folder, *loaded):
    """The printed lines of one side of the diff, and its parameters and buffers; the old side gets the loaded data."""
    loads = {"load_my_graph": lambda: loaded, "load_my_data": lambda: loaded[0]}
    known = {"Model": DGLModel if library == "dgl" else PyGModel, **loads}
    said, where = StringIO(), os.getcwd()
    os.chdir(folder)
    torch.set_default_dtype(torch.float64)
    try:
        with redirect_stdout(said):
            exec(code.replace(*EPOCHS), known)
    finally:
        os.chdir(where)
        torch.set_default_dtype(torch.float32)
    return [list(map(float, line.split())) for line in said.getvalue().splitlines()], known["model"].state_dict()


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("library", PAGES)
def test_both_sides_train_alike(pool, tmp_path, world_size, library):
    diff = re.search(r"```diff\n(.*?)```", (REPOSITORY / PAGES[library]).read_text(), re.DOTALL)[1]
    graph = my_graph()
    rows = {name: graph.ndata[name] for name in ("feat", "label", "train_mask", "val_mask")}
    loaded = graph, *rows.values()
    if library == "pyg":
        feat, label, train_mask, val_mask = rows.values()
        ends = torch.stack(graph.edges())
        loaded = (Data(feat, ends, y=label, train_mask=train_mask, val_mask=val_mask),)
    sar.partition_graph(loaded[0], "graph", world_size, tmp_path / "partitions" / "graph")
    expected, parameters = train(old_side(diff), library, tmp_path, *loaded)
    for rank, (printed, theirs) in enumerate(pool.run(train, new_side(diff), library, str(tmp_path))):
        if rank == 0:
            torch.testing.assert_close(torch.tensor(printed), torch.tensor(expected), rtol=1e-9, atol=1e-9)
        for name, value in parameters.items():
            torch.testing.assert_close(theirs[name], value, rtol=1e-8, atol=1e-9)
    assert len(expected) == 5
    assert expected[-1][0] < expected[0][0]
