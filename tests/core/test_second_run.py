"""The second run of a Python message function: what it finds again, and that it must make the same messages."""

import random

import dgl.function as fn
import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch.nn.functional import dropout

import sar
from tests.core.attempts import fail_on_all_ranks
from tests.parity.harness import check, random_data, run_everywhere, weighted_sum
from tests.parity.scenarios import SCENARIOS
from tests.parity.test_pyg_readout import with_special_values

DROP = nn.Dropout(0.5)


class Layer(nn.Module):
    """Draws from every default generator, and looks at `training`."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Sequential(nn.Dropout(0.5))

    def method(self, edges):
        return {"m": dropout(self.drop(edges.src["h"]), 0.3, training=self.training)}

    def numbers(self, edges):
        kept = torch.from_numpy(np.random.rand(len(edges), 1) < 0.5)  # noqa: NPY002
        return {"m": edges.src["h"] * kept * random.random() * (torch.rand(len(edges), 1) < 0.5)}


class Dropped(pyg.MessagePassing):
    def forward(self, x, edges):
        return self.propagate(edges, x=x)

    def message(self, x_j):
        return dropout(x_j, 0.5, training=self.training)


def states():
    return np.random.get_state()[1].tolist(), random.getstate(), torch.get_rng_state().tolist()  # noqa: NPY002


def linear(graph, data, how):
    """Messages are linear: of out = A x, the sum of out * x is that of grad * x, if grad is A' x as in the forward."""
    layer, x = Layer(), data.leaf("x")
    messages = {
        "a method": layer.method,
        "a variable": lambda edges: {"m": layer.drop(edges.src["h"])},
        "a global": lambda edges: {"m": DROP(edges.src["h"])},
        "random numbers": layer.numbers,
    }
    if how in messages:
        graph.ndata["h"] = x
        graph.update_all(messages[how], fn.sum("m", "out"))
        out = graph.ndata["out"]
    else:
        edge_conv = pyg.EdgeConv(nn.Sequential(nn.Linear(12, 6, False), layer.drop), "sum").to(x.dtype)
        layer = Dropped("sum") if how == "a layer of one's own" else edge_conv
        out = layer(x, sar.pyg.edge_index(graph))
    layer.eval(), DROP.eval()
    before = states()
    out.backward(x.detach())
    assert states() == before
    assert not any(module.training for module in [*layer.modules(), DROP])
    DROP.train()
    return {"sum out": (out * x).sum(), "sum grad": (x.grad * x).sum()}


@pytest.mark.parametrize(
    "how",
    ["a method", "a variable", "a global", "random numbers", "a layer of one's own", "a layer of PyTorch Geometric"],
)
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.processes("workers that share a process share its modules")
def test_what_is_found_again(pool, world_size, how):
    parts = SCENARIOS["isolated"](world_size)
    for (result,) in run_everywhere(pool, parts, random_data(parts, torch.float64), [(linear, (how,))]).values():
        torch.testing.assert_close(result["sum grad"], result["sum out"])


class Changing(nn.Module):
    """Makes other messages whenever it runs, or after `change`."""

    def __init__(self, how):
        super().__init__()
        self.how, self.own, self.calls, self.scale = how, torch.Generator(), 0, 2.0
        self.numbers = np.random.default_rng(0)

    def factor(self, rows):
        self.calls += 1
        if self.how == "a generator of torch":
            return (torch.rand(len(rows), 1, generator=self.own) < 0.5).to(rows.dtype)
        if self.how == "a generator of numpy":
            return torch.from_numpy(self.numbers.permutation(len(rows)))[:, None].to(rows.dtype)
        if self.how == "state":
            return 1 + 1e-3 * self.calls
        return self.scale

    def forward(self, edges):
        return {"m": edges.src["h"] * self.factor(edges.src["h"])}

    def masked(self, edges):
        """Few of the messages are finite."""
        h = edges.src["h"] * self.factor(edges.src["h"])
        return {"m": h.masked_fill(h < 1, -torch.inf)}


def changing(graph, data, how, call, dtype=torch.float64):
    message = Changing(how)
    h = data.leaf("x").to(dtype)
    graph.ndata["h"] = h
    if call == "apply_edges":
        graph.apply_edges(message)
        out = graph.edata["m"]
    else:
        graph.update_all(message.masked if call == "max" else message, getattr(fn, call)("m", "out"))
        out = graph.ndata["out"]
    message.scale = 2.1
    out.float().sum().backward()


def attention_changed(graph, data, layer):
    """Messages that are proportional to a softmax."""
    x, edges = data.leaf("x"), sar.pyg.edge_index(graph)
    types = [torch.zeros(count, dtype=torch.int64) for count in (len(x), edges.size(1))] * (layer == "HEATConv")
    conv = pyg.HEATConv(6, 4, 2, 2, 2, 6, 2) if types else pyg.TransformerConv(6, 4, edge_dim=6, dropout=0.2)
    out = conv.double()(x, edges, *types, data.edges["e"])
    conv.dropout = 0.7
    out.sum().backward()


OWN = ("a generator of torch", "a generator of numpy", "state", "an attribute")


@pytest.mark.parametrize(
    "program, args",
    [
        *((changing, (how, "sum")) for how in OWN),
        *((changing, ("an attribute", call)) for call in ("max", "mean", "apply_edges")),
        *((changing, ("an attribute", "sum", dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        (attention_changed, ("TransformerConv",)),
        (attention_changed, ("HEATConv",)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("world_size, mode", [(1, 1), (2, 1), (2, 2), (3, 3)])
def test_other_messages_than_in_the_forward_are_an_error(pool, world_size, mode, program, args):
    failures = fail_on_all_ranks(pool, SCENARIOS["random"](world_size), program, *args, mode=mode)
    assert any("makes other messages in the backward" in failure.message for failure in failures), failures
    assert {failure.kind for failure in failures} <= {"GraphError", "PeerError"}, failures


def unusual(graph, data, reducer):
    """NaN, infinities, and beside them what nobody reads, which may differ."""
    x, calls = data.leaf("special"), []

    def message(edges):
        calls.append(0)
        return {"m": edges.src["h"] * 2, "number": edges.src["h"] * 0 + len(calls)}

    graph.ndata["h"] = x
    graph.update_all(message, getattr(fn, reducer)("m", "out"))
    out = graph.ndata["out"]
    weighted_sum(out, data.nodes["cotangent"]).backward(retain_graph=True)
    weighted_sum(out, data.nodes["cotangent"]).backward()
    return {"node out": out, "node x.grad": x.grad}


@pytest.mark.parametrize("world_size", [1, 3])
def test_messages_that_are_not_finite_are_the_same(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    data = random_data(parts, torch.float64)
    data.nodes["special"] = with_special_values(data.nodes["x"])
    check(pool, parts, data, [(unusual, (how,)) for how in ("sum", "max", "min")], settings={"comm_buffer_bytes": 2000})
