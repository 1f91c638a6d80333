"""Python functions whose results depend on other rows than their own raise, in place of results of each tile."""

import dgl.function as fn
import pytest
import torch
from torch.ao.quantization import MinMaxObserver
from torch.nn import functional

from sar.core.passing.own_rows import makes_own_rows
from sar.errors import GraphError
from tests.parity.harness import build, check, deal, random_data, run_everywhere
from tests.parity.scenarios import SCENARIOS

OTHERS = {
    "count": lambda edges, x: x / edges.batch_size(),
    "mean": lambda edges, x: x - x.mean(0),
    "places": lambda edges, x: x * torch.arange(len(x)).unsqueeze(1),
    "first": lambda edges, x: x - x[:1],
    "sums so far": lambda edges, x: x.cumsum(0),
    "others": lambda edges, x: x * edges.dst["x"].flip(0),
    "greatest ID": lambda edges, x: x / (1 + edges.edges()[0].max()),
}
OWN = {
    "dropout": lambda edges, x: functional.dropout(x, 0.5) * 0,
    "noise": lambda edges, x: 0 * torch.randn_like(x) + (torch.rand(len(x), 1) < 2) * x,
    "shares": lambda edges, x: x.softmax(1) @ torch.ones(x.shape[1], 300).to(x),
    "half": lambda edges, x: (x.bfloat16() @ torch.ones(x.shape[1], 300).bfloat16()).to(x),
    "infinite": lambda edges, x: torch.where(x > 0, x, -torch.inf),
    "parts": lambda edges, x: x.view(len(x), 2, -1).transpose(1, 2),
    "constant": lambda edges, x: torch.ones_like(x),
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


@pytest.mark.parametrize("world_size", [1])
def test_messages_of_other_rows(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    run_everywhere(pool, parts, random_data(parts), [(sent_by_others, (name,)) for name in OTHERS], (1,))


REDUCED = {
    "count": lambda nodes, m: m.sum(1) / nodes.batch_size(),
    "mean": lambda nodes, m: m.sum(1) - m.mean((0, 1)),
    "first": lambda nodes, m: m.sum(1) - nodes.data["x"][:1],
}


def received(mine, name):
    partition, data = mine
    graph = build(partition, 1)
    graph.ndata["x"] = data.nodes["x"]
    graph.update_all(fn.copy_u("x", "m"), lambda nodes: {"out": REDUCED[name](nodes, nodes.mailbox["m"])})


@pytest.mark.parametrize("name", REDUCED)
@pytest.mark.parametrize("world_size", [2])
def test_nodes_of_other_rows(pool, world_size, name):
    parts = SCENARIOS["random"](world_size)
    found = pool.outcomes(received, name, per_rank=deal(parts, random_data(parts)))
    assert {outcome.kind for outcome in found} <= {"GraphError", "PeerError"}
    assert "makes other results of the same edges or nodes" in found[0].message


def test_random_functions_differ_by_place_alone():
    """Which is why random numbers are replaced when rows are compared."""
    draws = []

    def run(rows):
        x = torch.ones(len(rows.numbers), 3)
        draws.append(functional.dropout(x, 0.5) + torch.randn_like(x) + torch.empty_like(x).uniform_())
        return [draws[-1]]

    state = torch.get_rng_state()
    assert makes_own_rows(run, torch.device("cpu"), run)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(draws[0][:2], draws[1][3:5])
    assert torch.equal(draws[2][:2], draws[3][3:5])


def test_rounding_errors_are_not_taken_for_other_rows():
    """As of a sine of large numbers that a matrix product has rounded, here by the number of rows."""

    def run(rows):
        return [rows.of(torch.ones(4, 3)).mul(1e6 + len(rows.numbers)).add(1e-9).sin() for _ in range(2)]

    def count(rows):
        return [rows.of(torch.ones(4, 3)) / len(rows.numbers)]

    assert makes_own_rows(run, torch.device("cpu"), run) is None
    assert makes_own_rows(count, torch.device("cpu"), count) is False


def test_tries_leave_buffers_alone():
    """Or those of an observer would be NaN for good."""
    observer = MinMaxObserver()

    def run(rows):
        return [observer(rows.of(torch.ones(4, 3)))]

    assert makes_own_rows(run, torch.device("cpu"), run)
    assert (observer.min_val, observer.max_val) == (torch.inf, -torch.inf)
