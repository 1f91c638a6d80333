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


class Model(torch.nn.Module):
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


def train(code, folder, *loaded):
    """What one side of the diff prints, and its parameters and buffers; the old side gets what it loads."""
    known = {"Model": Model, "load_my_graph": lambda: loaded}
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
def test_both_sides_train_alike(pool, tmp_path):
    graph = my_graph()
    sar.partition_graph(graph, "graph", 2, tmp_path / "partitions" / "graph")
    rows = (graph.ndata[name] for name in ("feat", "label", "train_mask", "val_mask"))
    expected, parameters = train(old_side(DIFF), tmp_path, graph, *rows)
    for rank, (printed, theirs) in enumerate(pool.run(train, new_side(DIFF), str(tmp_path))):
        if rank == 0:
            torch.testing.assert_close(torch.tensor(printed), torch.tensor(expected), rtol=1e-9, atol=1e-9)
        for name, value in parameters.items():
            torch.testing.assert_close(theirs[name], value, rtol=1e-8, atol=1e-9)
    assert len(expected) == 5
    assert expected[-1][0] < expected[0][0]
