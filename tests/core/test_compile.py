"""`torch.compile` around a model: its dense parts are compiled, its distributed calls run as they are."""

import subprocess
import sys

import dgl.function as fn
import dgl.nn
import pytest
import torch
import torch.distributed as dist
from torch import nn

import sar
from tests.parity.harness import check, parameter_gradients, random_data, weighted_sum
from tests.parity.scenarios import SCENARIOS
from tests.workers import REPOSITORY


class Model(nn.Module):
    """A layer of each kind, with dense code before, between and after."""

    def __init__(self):
        super().__init__()
        self.first = dgl.nn.SAGEConv(6, 6, "mean")
        self.second = dgl.nn.GATConv(6, 3, 2, residual=True, allow_zero_in_degree=True)
        self.norm = sar.DistributedBN1D(6) if dist.is_initialized() else nn.BatchNorm1d(6)
        self.message = nn.Linear(6, 6)

    def forward(self, graph, x, w):
        h = self.first(graph, x * 2).relu() + x
        h = self.norm(self.second(graph, h).flatten(1).tanh()).sin()
        with graph.local_scope():
            graph.ndata["h"], graph.edata["w"] = h, w
            graph.update_all(lambda edges: {"m": self.message(edges.src["h"]) * edges.data["w"]}, fn.mean("m", "out"))
            h = graph.ndata["out"] + h
        return self.message(h).relu() * 0.5


def compiled_twice(graph, data, backend):
    """The second step runs what the first has compiled."""
    model = Model().to(data.nodes["x"].dtype)
    graphs = []

    def count(module, inputs):
        graphs.append(module)
        return module.forward

    compiled = model
    if dist.is_initialized():
        sar.patch_dgl()
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend or count)
    for _ in range(2):
        model.zero_grad()
        x, w = data.leaf("x"), data.leaf("w")
        out = compiled(graph, x, w)
        weighted_sum(out, data.nodes["cotangent"]).backward()
    if dist.is_initialized() and backend is None:
        assert graphs, "nothing was compiled"
    return {"node output": out, "node x.grad": x.grad, "edge w.grad": w.grad, **parameter_gradients(model)}


@pytest.mark.processes("virtual workers refuse torch.compile")
@pytest.mark.parametrize(
    "scenario, backend, mode", [("isolated", None, 1), ("first worker without nodes", "aot_eager", 2)]
)
@pytest.mark.parametrize("world_size", [2])
def test_a_compiled_model_makes_the_same_numbers(pool, world_size, scenario, backend, mode):
    parts = SCENARIOS[scenario](world_size)
    check(pool, parts, random_data(parts, torch.float64), [(compiled_twice, (backend,))], (mode,), timeout=200)


def test_importing_sar_does_not_import_the_compiler():
    code = "import sys, sar; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=60, check=True)
