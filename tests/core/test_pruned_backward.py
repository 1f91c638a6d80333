"""Backwards of which only some gradients are asked for: every worker's exchange ends, or all raise a clear error."""

import dgl.function as fn
import pytest
import torch
from torch import nn

import sar
from tests.core.attempts import fail_on_all_ranks
from tests.parity.harness import check, random_data, weighted_sum
from tests.parity.programs import LAYERS, gated
from tests.parity.scenarios import SCENARIOS

SHORT = 8.0
"""Seconds after which a worker that hangs gives up."""


def aggregate(graph, message, h, w):
    with graph.local_scope():
        graph.ndata["h"], graph.edata["w"] = h, w
        graph.update_all(message, fn.sum("m", "out"))
        return graph.ndata["out"]


def summed_over_workers(parameter):
    total = parameter.grad.clone()
    if sar.comm.is_initialized():
        sar.comm.all_reduce(total)
    return total


def only_a_captured_parameter(graph, data, after):
    """`after` the product, the message function needs the rows of a tile again, or does not."""
    x, w = data.leaf("x"), data.leaf("w")
    scale = nn.Parameter(torch.full((6,), 0.5, dtype=x.dtype))
    messages = {
        "product": lambda edges: {"m": edges.src["h"] * scale},
        "sum": lambda edges: {"m": edges.src["h"] + scale},
        "alone": lambda edges: {"m": edges.src["h"].detach() * 0 + scale * edges.data["w"]},
    }
    out = aggregate(graph, messages[after], x, w)
    weighted_sum(out, data.nodes["cotangent"]).backward(inputs=[scale], retain_graph=True)
    assert x.grad is None
    once = summed_over_workers(scale)
    weighted_sum(out, data.nodes["cotangent"]).backward()
    return {"same once": once, "same twice": summed_over_workers(scale), "node x": x.grad if after != "alone" else x}


def only_one_input(graph, data, layer):
    x, w = data.leaf("x"), data.leaf("w")
    out = LAYERS[layer](graph, LAYERS[layer](graph, x, w), w)
    weighted_sum(out, data.nodes["cotangent"]).backward(inputs=[x])
    assert w.grad is None
    return {"node x": x.grad}


def captured_tensors_of_every_kind(graph, data):
    """Captured leaves and what is made of them: one has a hook, and one is given to an autograd function."""
    x, w = data.leaf("x"), data.leaf("w")
    leaf = torch.full((6,), 0.5, dtype=x.dtype, requires_grad=True)
    model = nn.Linear(6, 6, bias=False).to(x.dtype)
    made = leaf.exp() + 1
    made.register_hook(lambda grad: 2 * grad)
    made.retain_grad()
    given = leaf.sin() + 2

    def message(edges):
        return {
            "m": Doubled.apply(edges.src["h"], given) * model(edges.dst["h"]).cos() + torch.cat([leaf[:3], made[3:]])
        }

    weighted_sum(aggregate(graph, message, x, w), data.nodes["cotangent"]).backward()
    if sar.comm.is_initialized():
        sar.gather_grads(model)
    return {
        "node x": x.grad,
        "same leaf": summed_over_workers(leaf),
        "same made": summed_over_workers(made),
        "same model": model.weight.grad,
    }


class Doubled(torch.autograd.Function):
    """2 a b."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return 2 * a * b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return 2 * grad * b, (2 * grad * a).sum(0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients(pool, world_size):
    parts = SCENARIOS["isolated"](world_size)
    cases = [(only_a_captured_parameter, (after,)) for after in ("product", "sum", "alone")]
    cases += [(only_one_input, (layer,)) for layer in LAYERS]
    cases += [(captured_tensors_of_every_kind, ())]
    check(pool, parts, random_data(parts, torch.float64), cases, settings={"timeout": SHORT})


def pruned_otherwise(graph, data):
    """One worker asks for nothing that this call has to do with."""
    x, w = data.leaf("x"), data.leaf("w")
    other = torch.ones(1, dtype=x.dtype, requires_grad=True)
    out = gated(graph, x, w)
    ((out * data.nodes["x"]).sum() * other).backward(inputs=[other] if sar.rank() == 1 else [x])
    gated(graph, x, w)


@pytest.mark.parametrize("world_size", [2, 3])
def test_workers_that_ask_for_different_gradients(pool, world_size):
    for failure in fail_on_all_ranks(pool, SCENARIOS["random"](world_size), pruned_otherwise, timeout=SHORT):
        assert failure.kind == "DisagreementError", failure
        assert "backward of" in failure.message


def captured_on_some_edges_only(graph, data):
    x, w = data.leaf("x"), data.leaf("w")
    scale = nn.Parameter(torch.ones(6, dtype=x.dtype))

    def message(edges):
        return {"m": edges.src["h"] * scale if len(edges) else edges.src["h"]}

    aggregate(graph, message, x, w).sum().backward()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parameter_that_is_used_on_some_edges_only(pool, world_size):
    """Without an error its gradient would be missing."""
    failures = fail_on_all_ranks(pool, SCENARIOS["random"](world_size), captured_on_some_edges_only, timeout=SHORT)
    assert any("on some edges only" in failure.message for failure in failures)


def captured_with_a_hook_by_a_function(graph, data):
    x, w = data.leaf("x"), data.leaf("w")
    scale = nn.Parameter(torch.ones(6, dtype=x.dtype))
    calls = []
    scale.register_hook(lambda grad: calls.append(1) or 2 * grad)
    aggregate(graph, lambda edges: {"m": Doubled.apply(edges.src["h"], scale)}, x, w).sum().backward()
    assert calls == [1]
    return {"node x.grad": x.grad, "sum scale.grad": scale.grad}


@pytest.mark.parametrize("world_size", [2])
def test_a_hook_runs_once(pool, world_size):
    """A function of the user's gets a stand-in of a variable around it."""
    parts = SCENARIOS["random"](world_size)
    check(pool, parts, random_data(parts, torch.float64), [(captured_with_a_hook_by_a_function, ())])
