"""The diff of the README: its new side on two workers trains as its old side does on one process."""

import os
import re
from contextlib import redirect_stdout
from io import StringIO

import dgl.function as fn
import pytest
import torch
from dgl.nn import EdgeConv, EdgeWeightNorm, GraphConv
from dgl.nn.functional import edge_softmax

import sar
from tests.pages.blocks import new_side, old_side
from tests.pages.files import small_graph
from tests.workers import REPOSITORY

DIFF = re.search(r"```diff\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)[1]
EPOCHS = "range(100)", "range(5)"


def my_graph():
    graph = small_graph()
    graph.ndata["feat"] = graph.ndata["feat"].double()
    graph.edata["w"] = graph.edata["w"].double() + 0.1
    return graph


class Normalised(torch.nn.Module):
    """Batch normalisation, the user's and a layer's own, and normalised edge weights."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.weights = GraphConv(12, 16), EdgeConv(16, 4, batch_norm=True), EdgeWeightNorm()
        self.norm = torch.nn.BatchNorm1d(16)

    def forward(self, graph, x):
        h = self.first(graph, x, edge_weight=self.weights(graph, graph.edata["w"]))
        return self.last(graph, self.norm(h).relu())


class Attention(torch.nn.Module):
    """A user's layer, with `edge_softmax` as this file imported it."""

    def __init__(self):
        super().__init__()
        self.key, self.value = torch.nn.Linear(12, 1), torch.nn.Linear(12, 4)

    def forward(self, graph, x):
        with graph.local_scope():
            graph.ndata.update(key=self.key(x), value=self.value(x))
            graph.apply_edges(fn.u_mul_v("key", "key", "score"))
            graph.edata["weight"] = edge_softmax(graph, graph.edata["score"])
            graph.update_all(fn.u_mul_e("value", "weight", "m"), fn.sum("m", "out"))
            return graph.ndata["out"]


MODELS = {model.__name__: model for model in (Normalised, Attention)}


def train(code, model, folder, *loaded):
    """What one side of the diff prints, and its parameters and buffers; the old side gets what it loads."""
    known = {"Model": MODELS[model], "load_my_graph": lambda: loaded}
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the partitions that the diff asks for, in double precision."""
    folder = tmp_path_factory.mktemp("diff")
    sar.partition_graph(my_graph(), "graph", 2, folder / "partitions" / "graph")
    return folder


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("world_size", [2])
def test_both_sides_train_alike(pool, folder, model):
    graph = my_graph()
    rows = (graph.ndata[name] for name in ("feat", "label", "train_mask", "val_mask"))
    expected, parameters = train(old_side(DIFF), model, folder, graph, *rows)
    for rank, (printed, theirs) in enumerate(pool.run(train, new_side(DIFF), model, str(folder))):
        if rank == 0:
            torch.testing.assert_close(torch.tensor(printed), torch.tensor(expected), rtol=1e-9, atol=1e-9)
        for name, value in parameters.items():
            torch.testing.assert_close(theirs[name], value, rtol=1e-8, atol=1e-9)
    assert len(expected) == 5
    assert expected[-1][0] < expected[0][0]
