"""How distributed calls combine under autograd: every combination gives the gradients of single-machine DGL."""

from typing import NamedTuple

import dgl.function as fn
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sar
from sar.comm import session
from tests.core.attempts import fail_on_all_ranks
from tests.matrix import corner
from tests.parity.harness import check, parameter_gradients, random_data, weighted_sum
from tests.parity.programs import LAYERS, largest, pairwise, weighted
from tests.parity.scenarios import SCENARIOS


def leaves(data):
    return data.leaf("x"), data.leaf("w")


def gradients(x, w, **more):
    return {"node x.grad": x.grad, "edge w.grad": w.grad if w.grad is not None else torch.zeros_like(w), **more}


def accumulated_over_two_backwards(graph, data, layer):
    """The second forward comes after the first backward."""
    x, w = leaves(data)
    model = nn.Linear(6, 6).to(x.dtype)
    for power in (1, 2):
        weighted_sum(LAYERS[layer](graph, model(x), w) ** power, data.nodes["cotangent"]).backward()
    return gradients(x, w, **parameter_gradients(model))


def retained_and_run_twice(graph, data, layer):
    x, w = leaves(data)
    loss = weighted_sum(LAYERS[layer](graph, LAYERS[layer](graph, x, w), w), data.nodes["cotangent"])
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    return gradients(x, w, **{"node once": once})


def independent_losses_in_forward_order(graph, data, layer):
    x, w = leaves(data)
    first, second = LAYERS[layer](graph, x, w), LAYERS[layer](graph, x.sin(), w * w)
    weighted_sum(first, data.nodes["cotangent"]).backward()
    weighted_sum(second, data.nodes["cotangent"]).backward()
    return gradients(x, w)


def residual_connections(graph, data, layer):
    x, w = leaves(data)
    h = x
    for _ in range(3):
        h = h + 0.3 * LAYERS[layer](graph, h, w).tanh()
    weighted_sum(h, data.nodes["cotangent"]).backward()
    return gradients(x, w, **{"node output": h})


def different_calls_share_an_input(graph, data, layer):
    x, w = leaves(data)
    h = LAYERS[layer](graph, x, w)
    both = weighted(graph, h, w) + pairwise(graph, h, w) * largest(graph, x, w)
    weighted_sum(both, data.nodes["cotangent"]).backward()
    return gradients(x, w)


def fields_overwritten_before_backward(graph, data, layer):
    """Frames may change between a forward and its backward; the call keeps what it read."""
    x, w = leaves(data)
    graph.ndata["h"], graph.edata["w"] = x, w
    out = LAYERS[layer](graph, graph.ndata["h"], graph.edata["w"])
    graph.ndata["h"] = torch.full_like(x, 100.0)
    graph.edata["w"] = torch.zeros_like(w)
    graph.ndata["out"] = torch.full_like(x, -100.0)
    weighted_sum(out * out, data.nodes["cotangent"]).backward()
    for frame, name in ((graph.ndata, "h"), (graph.ndata, "out"), (graph.edata, "w")):
        frame.pop(name)
    return gradients(x, w)


def settings_changed_before_backward(graph, data, layer):
    """A call's backward runs under the settings of its forward."""
    x, w = leaves(data)
    before = {name: getattr(sar.Config, name) for name in sar.Config.__annotations__}
    out = LAYERS[layer](graph, x, w)
    sar.Config.disable_sr = not sar.Config.disable_sr
    sar.Config.pipeline_depth = 3
    sar.Config.comm_buffer_bytes = 256
    sar.Config.max_collective_size = 8
    weighted_sum(out * out, data.nodes["cotangent"]).backward()
    for name, value in before.items():
        setattr(sar.Config, name, value)
    return gradients(x, w)


def frozen_inputs_and_no_grad(graph, data, layer):
    """Evaluation between training calls leaves no trace in them."""
    x, w = leaves(data)
    with torch.no_grad():
        quiet = LAYERS[layer](graph, x, w)
    assert not quiet.requires_grad
    assert not LAYERS[layer](graph, x.detach(), w.detach()).requires_grad
    out = LAYERS[layer](graph, x, w.detach())
    weighted_sum(out * quiet, data.nodes["cotangent"]).backward()
    return gradients(x, w, **{"node quiet": quiet})


def inference_before_training(graph, data, layer):
    """What an evaluation leaves behind, buffers for messages above all, is fit for training."""
    x, w = leaves(data)
    if dist.is_initialized():
        session.current_group().pool.shrink(0)
    with torch.inference_mode():
        quiet = LAYERS[layer](graph, x, w)
    out = LAYERS[layer](graph, x, w)
    weighted_sum(out, data.nodes["cotangent"]).backward()
    return gradients(x, w, **{"node quiet": quiet.clone()})


def only_edges_take_a_gradient(graph, data, layer):
    x, w = leaves(data)
    out = LAYERS[layer](graph, x.detach(), w)
    if out.requires_grad:
        weighted_sum(out, data.nodes["cotangent"]).backward()
    x.grad = torch.zeros_like(x)
    return gradients(x, w)


def parameters_captured_by_a_message_function(graph, data):
    """Autograd finds what a Python function uses, on every tile."""
    x, w = leaves(data)
    model, scale = nn.Linear(6, 6).to(x.dtype), nn.Parameter(torch.tensor(0.5, dtype=x.dtype))
    graph.ndata["h"] = x

    def message(edges, *, factor=0.5):
        h = model(edges.src["h"] * w.mean()).sin() * scale
        return {"m": factor * h, "n": edges.dst["h"] - edges.src["h"]}

    graph.apply_edges(message)
    out = graph.edata.pop("m") * graph.edata.pop("n")
    weighted_sum(out, data.edges["edge cotangent"]).backward()
    graph.ndata.pop("h")
    module = nn.Module()
    module.model, module.scale = model, scale
    return {"node x.grad": x.grad, "edge out": out, **parameter_gradients(module)}


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def parameters_in_a_named_tuple(graph, data):
    x, pair = data.leaf("x"), Pair(*nn.Parameter(torch.arange(6.0, dtype=data.nodes["x"].dtype)).split(3))
    graph.ndata["h"] = x
    graph.update_all(lambda edges: {"m": edges.src["h"] * torch.cat(pair)}, fn.max("m", "out"))
    weighted_sum(graph.ndata.pop("out"), data.nodes["cotangent"]).backward()
    graph.ndata.pop("h")
    return {"node x.grad": x.grad}


def hidden_from_torch(graph, data, how):
    """Parameters of code whose operations are not seen one by one. Without an error, their gradients would be lost."""
    model, weight = torch.jit.script(nn.Linear(6, 6).double()), nn.Parameter(torch.ones(6).double())
    x = data.leaf("x") if how == "beside others" else data.nodes["x"]
    if how == "computed before":
        weight = 2 * weight
    product = torch.jit.script(multiplied)
    messages = (lambda h: model(h)) if how == "of a module" else (lambda h: product(h, weight))
    graph.ndata["h"] = x
    graph.update_all(lambda edges: {"m": messages(edges.src["h"])}, fn.sum("m", "out"))
    graph.ndata["out"].sum().backward()
    sar.all_sum(0.0)  # where a worker without such edges, which has finished its call, gets the error of the others


def multiplied(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


PROGRAMS = [
    accumulated_over_two_backwards,
    retained_and_run_twice,
    independent_losses_in_forward_order,
    residual_connections,
    different_calls_share_an_input,
    fields_overwritten_before_backward,
    settings_changed_before_backward,
    frozen_inputs_and_no_grad,
    inference_before_training,
    only_edges_take_a_gradient,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize(
    "world_size, scenario",
    [
        (1, "isolated"),
        corner(2, "isolated"),
        corner(3, "isolated"),
        corner(2, "first worker without nodes"),
        (3, "first worker without nodes"),
    ],
)
def test_gradients(pool, world_size, program, scenario):
    parts = SCENARIOS[scenario](world_size)
    check(pool, parts, random_data(parts, torch.float64), [(program, (layer,)) for layer in LAYERS])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parameters_captured_by_a_message_function(pool, world_size):
    parts = SCENARIOS["isolated"](world_size)
    data = random_data(parts, torch.float64)
    data.edges["w"] = torch.full_like(data.edges["w"], 0.7)  # whose local mean is the global one
    programs = parameters_captured_by_a_message_function, parameters_in_a_named_tuple
    check(pool, parts, data, [(program, ()) for program in programs])


@pytest.mark.parametrize("how", ["of a module", "beside others", "computed before"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_hidden_from_torch(pool, world_size, how):
    failures = fail_on_all_ranks(pool, SCENARIOS["isolated"](world_size), hidden_from_torch, how)
    assert any("that sar does not see" in failure.message for failure in failures), failures


SETTINGS = [
    {"comm_buffer_bytes": 1},
    {"comm_buffer_bytes": 700, "pipeline_depth": 2},
    {"max_collective_size": 20, "pipeline_depth": 3},
    {"comm_buffer_bytes": 2000, "max_collective_size": 50, "pipeline_depth": 0},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("world_size", [corner(2), 3])
def test_settings_do_not_change_the_numbers(pool, world_size, settings):
    parts = SCENARIOS["random"](world_size)
    cases = [(residual_connections, (layer,)) for layer in LAYERS]
    check(pool, parts, random_data(parts, torch.float64), cases, settings=settings)
