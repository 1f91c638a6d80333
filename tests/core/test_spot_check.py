"""Python functions must look at their own edge or node only: those that do not raise, in place of wrong results."""

import random

import dgl.function as fn
import numpy as np
import pytest
import torch
from torch import nn
from torch.ao.quantization import MinMaxObserver
from torch.nn import functional

from sar.errors import GraphError
from tests.parity.harness import build, check, deal, random_data, run_everywhere
from tests.parity.scenarios import SCENARIOS


class Norm(nn.BatchNorm1d):
    """A batch norm by another name."""


OTHERS = {
    "count": lambda edges, x: x / edges.batch_size(),
    "small": lambda edges, x: 1e-9 * x * len(x) ** -0.5,
    "mean": lambda edges, x: x - x.mean(0),
    "above the mean": lambda edges, x: (x > x.mean()).to(x),
    "places": lambda edges, x: x * torch.arange(len(x)).unsqueeze(1),
    "first": lambda edges, x: x - x[:1],
    "sums so far": lambda edges, x: x.cumsum(0),
    "others": lambda edges, x: x * edges.dst["x"].flip(0),
    "greatest ID": lambda edges, x: x / (1 + edges.edges()[0].max()),
    "hidden batch norm": lambda edges, x: [nn.BatchNorm1d(6).to(x)][0](x),
}
LOG = []
NORMS = {"norm": nn.BatchNorm1d(6), "its subclass": Norm(6), "without statistics": nn.BatchNorm1d(6).eval()}
NORMS["without statistics"].running_mean = None
FROZEN, OBSERVER = nn.BatchNorm1d(6).eval(), MinMaxObserver()
OWN = {
    "dropout": lambda edges, x: functional.dropout(x, 0.5) * 0,
    "noise": lambda edges, x: 0 * torch.randn_like(x) + (torch.rand(len(x), 1) < 2) * x,
    "noise of numpy": lambda edges, x: x + 0 * torch.from_numpy(np.random.rand(len(x), 1)),  # noqa: NPY002
    "noise of Python": lambda edges, x: x + 0 * random.random(),
    "layer norm": lambda edges, x: functional.layer_norm(x, (6,)),
    "shares": lambda edges, x: x.softmax(1) @ torch.ones(x.shape[1], 300).to(x),
    "half": lambda edges, x: (x.bfloat16() @ torch.ones(x.shape[1], 300).bfloat16()).to(x),
    "infinite": lambda edges, x: torch.where(x > 0, x, -torch.inf),
    "parts": lambda edges, x: x.view(len(x), 2, -1).transpose(1, 2),
    "constant": lambda edges, x: torch.ones_like(x),
    "log": lambda edges, x: (LOG.append(len(x)), x)[1],
    "frozen norm": lambda edges, x: FROZEN.double()(x),
    "observer": lambda edges, x: OBSERVER(x),
}


def sent(graph, data, name, how):
    """Messages that are summed, or become values of edges."""
    graph.ndata["x"] = data.nodes["x"]

    def message(edges):
        return {"m": (OTHERS | OWN)[name](edges, edges.src["x"])}

    if how == "edges":
        graph.apply_edges(message)
        return {"edge out": graph.edata["m"]}
    graph.update_all(message, fn.sum("m", "out"))
    return {"node out": graph.ndata["out"]}


@pytest.mark.parametrize("world_size", [2])
def test_messages_of_own_rows(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    cases = [(sent, (name, how)) for name in OWN for how in ("sum", "edges")]
    check(pool, parts, random_data(parts, torch.float64), cases, (1,), {"comm_buffer_bytes": 1000})


def sent_by_others(graph, data, name):
    for how in ("sum", "edges"):
        with pytest.raises(GraphError, match="message makes other results of the same edges"):
            sent(graph, data, name, how)
    return {}


def sent_by_norms(graph, data, name):
    """They are refused by their type, with statistics that do not change."""
    graph.ndata["x"], norm = data.nodes["x"], NORMS[name]
    before = {key: value.clone() for key, value in norm.state_dict().items()}
    with pytest.raises(GraphError, match=f"calls a {type(norm).__name__}, which takes statistics"):
        graph.update_all(lambda edges: {"m": norm(edges.src["x"])}, fn.sum("m", "out"))
    assert all(torch.equal(value, before[key]) for key, value in norm.state_dict().items())
    return {}


@pytest.mark.parametrize("world_size", [1])
def test_messages_of_other_rows(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    cases = [*[(sent_by_others, (name,)) for name in OTHERS], *[(sent_by_norms, (name,)) for name in NORMS]]
    run_everywhere(pool, parts, random_data(parts), cases, (1,))


REDUCED = {
    "count": lambda nodes, m: m.sum(1) / nodes.batch_size(),
    "mean": lambda nodes, m: m.sum(1) - m.mean((0, 1)),
    "first": lambda nodes, m: m.sum(1) - nodes.data["x"][:1],
}


def received(mine, name):
    partition, data = mine
    graph, norm = build(partition, 1), NORMS["norm"]
    graph.ndata["x"] = data.nodes["x"]
    graph.update_all(
        fn.copy_u("x", "m"),
        lambda nodes: (
            {"out": norm(nodes.data["x"]), "x": nodes.mailbox["m"].sum(1)}
            if name == "norm"
            else {"out": REDUCED[name](nodes, nodes.mailbox["m"])}
        ),
    )


@pytest.mark.parametrize("name", [*REDUCED, "norm"])
@pytest.mark.parametrize("world_size", [2])
def test_nodes_of_other_rows(pool, world_size, name):
    """None is left waiting for the worker that raises."""
    parts = SCENARIOS["random"](world_size)
    found = pool.outcomes(received, name, per_rank=deal(parts, random_data(parts)))
    assert {outcome.kind for outcome in found} <= {"GraphError", "PeerError"}
    expected = "which takes statistics" if name == "norm" else "makes other results of the same edges or nodes"
    assert expected in found[0].message


class Layer(nn.Module):
    """Its message does not call the batch norm; it writes into a buffer, and makes rounding errors large."""

    def __init__(self):
        super().__init__()
        self.norm, self.lin = nn.BatchNorm1d(6), nn.Linear(6, 6, bias=False)
        self.register_buffer("calls", torch.zeros(()))
        self.times = 0

    def forward(self, graph, message):
        return graph.update_all(message, fn.sum("m", "out"))

    def rounded(self, edges):
        return {"m": (1e6 * self.lin(edges.src["x"])).sin()}

    def counted(self, edges):
        self.calls += 1
        self.times += 1
        return {"m": edges.src["x"] * self.times}


def once(mine):
    """Calls of a function that logs, and of a layer's functions, on one graph; what stays as it was."""
    graph, layer, generator = build(mine[0], 1), Layer(), torch.Generator()
    graph.ndata["x"] = mine[1].nodes["x"]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    lengths = []
    for _ in range(2):
        lengths.append([])
        graph.update_all(lambda edges: {"m": (lengths[-1].append(len(edges)), edges.src["x"])[1]}, fn.sum("m", "out"))
    graph.update_all(
        lambda edges: {"m": edges.src["x"] * torch.rand(len(edges), 1, generator=generator)}, fn.sum("m", "out")
    )
    with torch.no_grad():  # without a backward, in which messages that change raise
        layer(graph, layer.rounded)
        layer(graph, layer.counted)
    assert layer.times == layer.calls == 2  # the recording, and the one tile
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == (states[1], states[2].tolist())  # noqa: NPY002
    return lengths


@pytest.mark.parametrize("world_size", [1])
def test_the_first_call_on_a_graph_is_checked(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    ((first, second),) = pool.run(once, per_rank=deal(parts, random_data(parts)))
    assert second == [0, first[1]]  # the recording, and the one tile
    assert first[:2] == second
    assert set(first[2:]) <= {4, 5, 6, 7}
    assert 32 < sum(first[2:]) <= 64
