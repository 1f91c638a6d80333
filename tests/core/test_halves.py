"""Calls in two halves: what stands between them is computed while messages travel, and may fail there."""

from contextlib import contextmanager
from unittest.mock import patch

import dgl.nn
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import SAGEConv

import sar
from sar.core import collective, overlap
from sar.core.overlap import Overlapping
from sar.core.passing import messages, reducers
from tests.core.attempts import catch, fail_on_all_ranks
from tests.matrix import corner
from tests.parity.harness import build, check, parameter_gradients, random_data, random_shares, weighted_sum
from tests.parity.pyg_layers import edges_of, layer_results, random_parts
from tests.parity.scenarios import SCENARIOS

pytestmark = pytest.mark.processes("workers of one process make such calls in one piece")


@contextmanager
def in_two_halves():
    """Calls of any size; yields a list of what happens, and in which order."""
    events = []

    def note_end(paused):
        events.append("rest")
        return finish(paused)

    finish = Overlapping.finish
    with patch.object(collective, "SMALL_TILE", 0), patch.object(Overlapping, "finish", note_end):
        yield events


def train(graph, data, how):
    """Two layers: one whose products travel, and one whose inputs do."""
    torch.manual_seed(1)
    model = nn.ModuleList(dgl.nn.SAGEConv(*widths, "mean") for widths in ((6, 4), (4, 6))).to(torch.float64)
    x = data.leaf("x")
    if how == "frozen":
        x = x.detach()
        model[0].requires_grad_(False)
    h = x
    for layer in model:
        block = lambda h, layer=layer: layer(graph, h).tanh()  # noqa: E731
        h = checkpoint(block, h, use_reentrant=False) if how == "checkpointed" else block(h)
    loss = weighted_sum(h, data.nodes["cotangent"])
    if how == "twice":
        loss.backward(retain_graph=True)
    loss.backward()
    with torch.inference_mode():
        evaluated = model[0](graph, data.nodes["x"])
    gradients = parameter_gradients(model)
    if x.grad is not None:
        gradients["node x.grad"] = x.grad
    return {"node h": h, "node evaluated": evaluated, **gradients}


def train_in_two_halves(graph, data, how):
    """The same bits as in one piece."""
    if not dist.is_initialized():
        return train(graph, data, how)
    sar.patch_dgl()
    expected = train(graph, data, how)
    with in_two_halves() as events:
        made = train(graph, data, how)
    assert events
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], expected[name]) for name in expected)
    return made


@pytest.mark.parametrize("scenario", ["isolated", "first worker without nodes"])
@pytest.mark.parametrize("world_size", [corner(2), 3])
def test_results_and_gradients(pool, world_size, scenario):
    parts = SCENARIOS[scenario](world_size)
    cases = [(train_in_two_halves, (how,)) for how in ("", "frozen", "checkpointed", "twice")]
    check(pool, parts, random_data(parts, torch.float64), cases)


PYG_LAYERS = ("SAGEConv", "SAGEConv several", "SAGEConv sum pair", "GraphConv weighted")
UNSPLIT = ("SAGEConv max", "SAGEConv project")
"""One whose messages a Python function makes, and one without a part of the nodes' own."""


def in_two_halves_where_possible(graph, data, name):
    with in_two_halves() as events:
        made = layer_results(graph, data, name)
    assert bool(events) == (name in PYG_LAYERS and dist.is_initialized()), name
    return made


@pytest.mark.parametrize("world_size", [2])
def test_layers_of_pytorch_geometric(pool, world_size):
    parts = random_parts(world_size)
    cases = [(in_two_halves_where_possible, (name,)) for name in (*PYG_LAYERS, *UNSPLIT)]
    check(pool, parts, random_data(parts, torch.float64), cases, modes=(1, 2))


def hops(graph, data, how):
    """`TAGConv`, whose hops are multiplied one by one where nothing else sees the product of all."""
    torch.manual_seed(1)
    layer, x = dgl.nn.TAGConv(6, 4, k=2, bias=how != "no bias", activation=torch.tanh).double(), data.leaf("x")
    weights = data.edges["w"][:, 0] if how == "weighted" else None
    if how == "hooked":
        layer.lin.register_forward_hook(lambda module, given, made: 2 * made)
    if dist.is_initialized():
        sar.patch_dgl()
    with in_two_halves() as events:
        out = layer(graph, x, edge_weight=weights)
        weighted_sum(out, data.nodes["cotangent"]).backward()
    assert len(events) == (4 if how in ("", "no bias") and dist.is_initialized() else 0)
    return {"node h": out, "node x.grad": x.grad, **parameter_gradients(layer)}


def hooked(graph, data, kind):
    """Hooks on the module beside the call see and change what they do on one machine; so do those on `propagate`."""
    torch.manual_seed(1)
    layer, x, seen = SAGEConv(6, 4).double(), data.leaf("x"), []
    layer.lin_r.register_forward_hook(lambda module, given, made: seen.append(made) or 2 * made)
    if kind == "propagate":
        layer.register_propagate_forward_hook(lambda module, given, made: 3 * made)
    with in_two_halves() as events:
        out = layer(x, edges_of(graph))
        weighted_sum(out, data.nodes["cotangent"][:, :4]).backward()
    assert bool(events) == dist.is_initialized()
    assert isinstance(layer.lin_r, nn.Module)
    [own] = seen
    return {"node own": own, "node h": out, "node x.grad": x.grad, **parameter_gradients(layer)}


def lazy(graph, data, _):
    """Parameters are drawn in the order in which the layer calls its modules."""
    torch.manual_seed(1)
    layer, x = SAGEConv(-1, 4).double(), data.leaf("x")
    with in_two_halves() as events:
        first, second = layer(x, edges_of(graph)), layer(x, edges_of(graph))
    assert bool(events) == dist.is_initialized()
    return {"node first": first, "node second": second}


class Tied(SAGEConv):
    """Also applies to neighbours' rows what `SAGEConv` applies to the nodes' own."""

    def message(self, x_j):
        return self.lin_r(x_j) + self.lin_r.weight.sum()


def tied(graph, data, _):
    torch.manual_seed(1)
    layer, x = Tied(6, 6).double(), data.leaf("x")
    with in_two_halves():
        out = layer(x, edges_of(graph))
        weighted_sum(out[:, :4], data.nodes["cotangent"][:, :4]).backward()
    return {"node h": out, "node x.grad": x.grad, **parameter_gradients(layer)}


@pytest.mark.parametrize(
    "program, cases",
    [(hops, ("", "no bias", "hooked", "weighted")), (hooked, ("module", "propagate")), (lazy, ()), (tied, ())],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("world_size", [2])
def test_layers(pool, world_size, program, cases):
    parts = SCENARIOS["isolated" if program is hops else "random"](world_size)
    modes = (1, 2) if program is hops else (1, 2, 3)
    check(pool, parts, random_data(parts, torch.float64), [(program, (case,)) for case in cases or ("",)], modes)


def one_row_for_all(graph, data):
    sar.patch_dgl()
    with in_two_halves():
        dgl.nn.TAGConv(6, 4).double()(graph, data.leaf("x")[:1])


def add_own(graph, x, in_forward, in_backward):
    """The mean of the sources' x and each node's own x; both functions are called between the halves."""

    def own():
        in_forward()
        made = 2 * x
        made.register_hook(lambda grad: in_backward())
        return made

    with overlap.meanwhile(own) as made:
        mean = messages.aggregate(graph.call_context(), messages.COPY_SOURCE, "mean", x)
    return mean + made()


def what_happens(mine):
    partition, data = mine
    graph = build(partition, 1)
    with in_two_halves() as events:
        out = add_own(graph, data.leaf("x"), lambda: events.append("forward"), lambda: events.append("backward"))
        weighted_sum(out, data.nodes["cotangent"]).backward()
    return events


@pytest.mark.parametrize("world_size", [2])
def test_the_second_half_comes_after_what_stands_between(pool, world_size):
    for events in pool.run(what_happens, per_rank=random_shares(world_size, torch.float64)):
        assert events == ["forward", "rest", "backward", "rest"]


def fail_on_worker_1(*_, **__):
    if sar.rank() == 1:
        raise ValueError("on purpose")


def nothing():
    pass


def error_in_the_forward(graph, data):
    with in_two_halves():
        add_own(graph, data.leaf("x"), fail_on_worker_1, nothing)
        sar.all_sum(1.0)


def error_in_the_second_half(graph, data):
    with in_two_halves(), patch.object(reducers, "aggregate_sum", fail_on_worker_1):
        add_own(graph, data.leaf("x"), nothing, nothing)
        sar.all_sum(1.0)


def change_in_place(graph, data):
    x = 1 * data.leaf("x")
    with in_two_halves():
        add_own(graph, x, lambda: torch.relu_(x), nothing)


@pytest.mark.parametrize(
    "program, words", [(change_in_place, "in place"), (one_row_for_all, "Sizes of tensors must match")]
)
@pytest.mark.parametrize("world_size", [2])
def test_layers_that_are_refused(pool, world_size, program, words):
    """What is computed beside a call leaves the rows as they are."""
    failures = fail_on_all_ranks(pool, SCENARIOS["random"](world_size), program)
    assert all(words in failure.message for failure in failures)


@pytest.mark.parametrize("program", [error_in_the_forward, error_in_the_second_half])
@pytest.mark.parametrize("world_size", [2])
def test_an_error_reaches_everybody(pool, world_size, program):
    failures = fail_on_all_ranks(pool, SCENARIOS["random"](world_size), program)
    assert failures[1].kind == "ValueError"
    assert "CommunicationError" in failures[0].bases
    assert all("on purpose" in failure.message for failure in failures)


def error_in_the_backward(mine):
    """All go on in step after it: worker 1 has sent what the other waits for."""
    partition, data = mine
    graph, x = build(partition, 1), data.leaf("x")

    def step(x, in_backward):
        weighted_sum(add_own(graph, x, nothing, in_backward), data.nodes["cotangent"]).backward()

    step(x, nothing)
    with in_two_halves() as events:
        failure = catch(step, data.leaf("x"), fail_on_worker_1)
        again = data.leaf("x")
        step(again, nothing)
    assert torch.equal(x.grad, again.grad)
    return failure, events


@pytest.mark.parametrize("world_size", [2])
def test_an_error_in_the_backward_is_one_worker_s_own(pool, world_size):
    of_0, of_1 = pool.run(error_in_the_backward, per_rank=random_shares(world_size, torch.float64))
    assert of_0[0] is None
    assert "on purpose" in of_1[0].message
    # Worker 1 runs the rest of the first backward in the agreement after it.
    assert of_0[1] == of_1[1] == ["rest"] * 4
