"""Rules of autograd across workers: who needs a gradient, double backward, fields changed in place."""

from functools import partial

import dgl
import dgl.function as fn
import pytest
import torch
from torch.autograd import forward_ad
from torch_geometric.nn import EdgeConv, SimpleConv

import sar
from sar.core.passing.at_sources import sum_at_sources
from tests.core.attempts import catch_and_recover, fail_on_all_ranks
from tests.matrix import corner
from tests.parity.harness import assert_close, build, check, deal, random_data, run_on_one_machine, weighted_sum
from tests.parity.programs import LAYERS, gated, pairwise, weighted
from tests.parity.scenarios import SCENARIOS


def through_two_layers(graph, data, layer, name, needed=True):
    """Only x or w takes a gradient."""
    fields = {"x": data.nodes["x"], "w": data.edges["w"]}
    leaf = fields[name] = fields[name].clone().requires_grad_(needed)
    out = LAYERS[layer](graph, fields["x"], fields["w"])
    weighted_sum(LAYERS[layer](graph, out, fields["w"]), data.nodes["cotangent"]).backward()
    return leaf.grad, out.requires_grad


def on_one_machine(graph, data, layer, name):
    return {"node x" if name == "x" else "edge w": through_two_layers(graph, data, layer, name)[0]}


def gradient_on_one_rank(mine, layer, name, mode, chosen):
    """Only the chosen rank's field takes a gradient, and every rank runs the backward."""
    partition, data = mine
    return through_two_layers(build(partition, mode), data, layer, name, sar.rank() == chosen)


@pytest.mark.parametrize("layer, name", [*((layer, "x") for layer in LAYERS), ("weighted", "w")])
@pytest.mark.parametrize("mode", [1, 2, 3])
@pytest.mark.parametrize("world_size", [2, corner(3)])
def test_a_gradient_wanted_on_one_rank_only(pool, world_size, mode, layer, name):
    """The gradient of an edge weight fetches source rows again, from ranks that want no gradient themselves."""
    parts = SCENARIOS["random"](world_size)
    data = random_data(parts, torch.float64)
    (found,) = run_on_one_machine(parts, data, [(on_one_machine, (layer, name))])
    (grad,) = found.values()
    expected = parts.split_nodes(grad) if name == "x" else parts.split_edges(grad)
    for chosen in range(world_size):
        results = pool.run(gradient_on_one_rank, layer, name, mode, chosen, per_rank=deal(parts, data))
        assert [requires_grad for _, requires_grad in results] == [True] * world_size
        assert [grad is None for grad, _ in results] == [rank != chosen for rank in range(world_size)]
        assert_close(results[chosen][0], expected[chosen])


def double_backward(graph, data, layer):
    x, w = data.leaf("x"), data.leaf("w")
    out = LAYERS[layer](graph, x, w)
    (grad,) = torch.autograd.grad(weighted_sum(out.sin(), data.nodes["cotangent"]), x, create_graph=True)
    grad.square().sum().backward()


def double_backward_of_a_linear_loss(graph, data, layer):
    """The gradient that comes to the call needs none itself; what is local alone would be a second derivative."""
    x, w = data.leaf("x"), data.leaf("w")
    loss = weighted_sum(LAYERS[layer](graph, x, w), data.nodes["cotangent"]) + x.pow(3).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    torch.autograd.grad(grad.square().sum(), x)


@pytest.mark.parametrize("program", [double_backward, double_backward_of_a_linear_loss], ids=lambda f: f.__name__)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("mode", [1, 2, 3])
@pytest.mark.parametrize("world_size", [corner(1), 2])
def test_double_backward_raises(pool, world_size, mode, layer, program):
    """`weighted` is linear in x, yet its second derivative in w and x is not 0: silence would be wrong."""
    for failure in fail_on_all_ranks(pool, SCENARIOS["random"](world_size), program, layer, mode=mode):
        assert failure.kind == "GraphError", failure
        assert "twice" in failure.message, failure.message


OF_EDGE_VALUES = {
    "softmax by destination": lambda graph, w: sar.edge_softmax(graph, w),
    "softmax by source": lambda graph, w: sar.edge_softmax(graph, w, norm_by="src"),
    "sums at sources": lambda graph, w: sum_at_sources(graph.call_context(), w),
    "batch norm": lambda graph, w: sar.DistributedBN1D(1).to(w.dtype)(w),
}


def double_backward_of_edge_values(graph, data, name):
    w = data.leaf("w")
    loss = OF_EDGE_VALUES[name](graph, w).sum() + w.pow(3).sum()
    (grad,) = torch.autograd.grad(loss, w, create_graph=True)
    grad.square().sum().backward()


@pytest.mark.parametrize("name", OF_EDGE_VALUES)
@pytest.mark.parametrize("world_size", [2])
def test_double_backward_of_edge_values_raises(pool, name):
    for failure in fail_on_all_ranks(pool, SCENARIOS["random"](2), double_backward_of_edge_values, name):
        assert failure.kind == "GraphError", failure
        assert "twice" in failure.message, failure.message


def field_changed_in_place(graph, data, layer, name):
    """torch's own check: a tensor that the backward needs has changed."""
    fields = {"x": data.leaf("x") * 1, "w": data.leaf("w") * 1}
    out = layer(graph, fields["x"], fields["w"])
    fields[name].add_(1)
    out.sum().backward()


def uses_captured(graph, data, change):
    """A message function with a parameter and a constant, both given to `change` between forward and backward."""
    model, scale = torch.nn.Linear(6, 6).double(), torch.full((6,), 2.0, dtype=torch.float64)
    graph.ndata["h"] = data.leaf("x")
    graph.update_all(lambda edges: {"m": (model(edges.src["h"]) * scale).tanh()}, fn.sum("m", "out"))
    change(model, scale)
    graph.ndata["out"].sum().backward()


def captured_parameter_updated(graph, data):
    """Replayed with the new weights, the function would have other gradients."""
    uses_captured(graph, data, lambda model, _: torch.optim.SGD(with_gradients(model), lr=1.0).step())


def captured_constant_changed_in_place(graph, data):
    uses_captured(graph, data, lambda _, scale: scale.mul_(3))


def with_gradients(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return list(model.parameters())


def parameter_of_a_pyg_layer_updated(graph, data):
    layer = EdgeConv(torch.nn.Linear(12, 6)).double()
    out = layer(data.leaf("x"), sar.pyg.edge_index(graph)).tanh()
    torch.optim.SGD(with_gradients(layer), lr=1.0).step()
    out.sum().backward()


@pytest.mark.parametrize(
    "program, args",
    [
        (field_changed_in_place, (pairwise, "x")),
        (field_changed_in_place, (weighted, "w")),
        (field_changed_in_place, (gated, "x")),
        (captured_parameter_updated, ()),
        (captured_constant_changed_in_place, ()),
        (parameter_of_a_pyg_layer_updated, ()),
    ],
)
@pytest.mark.parametrize("mode", [1, 2, 3])
@pytest.mark.parametrize("world_size", [2])
def test_a_needed_field_changed_in_place_is_an_error(pool, program, args, mode):
    """Fetching the changed rows again in the backward would give wrong gradients without a word."""
    failures = fail_on_all_ranks(pool, SCENARIOS["random"](2), program, *args, mode=mode)
    assert any("modified by an inplace operation" in failure.message for failure in failures), failures
    for failure in failures:
        assert failure.kind in ("RuntimeError", "PeerError"), failure


def weights_of_a_functional_call(graph, data):
    """They are a layer's only as long as the call lasts."""
    model = torch.nn.Linear(6, 6).double()

    def message(edges):
        return {"m": model(edges.src["h"])}

    class Sums(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self):
            graph.update_all(message, fn.sum("m", "out"))
            return graph.ndata["out"]

    graph.ndata["h"] = data.leaf("x")
    layer = Sums()
    torch.func.functional_call(layer, {k: 2 * v for k, v in layer.named_parameters()}, ()).sum().backward()


def constant_replaced(graph, data):
    """Another tensor, not another value."""
    model = torch.nn.Module()
    model.scale = torch.full((6,), 2.0, dtype=torch.float64)
    graph.ndata["h"] = data.leaf("x")
    graph.update_all(lambda edges: {"m": edges.src["h"] * model.scale}, fn.sum("m", "out"))
    model.scale = 3 * model.scale
    graph.ndata["out"].sum().backward()


@pytest.mark.parametrize("program", [weights_of_a_functional_call, constant_replaced], ids=lambda f: f.__name__)
@pytest.mark.parametrize("world_size", [2])
def test_a_message_function_that_uses_other_tensors_in_the_backward_is_an_error(pool, program):
    failures = fail_on_all_ranks(pool, SCENARIOS["random"](2), program)
    assert any("in the backward" in failure.message for failure in failures), failures


class Counting(torch.nn.Module):
    """Counts its calls in a buffer, as batch normalisation does."""

    def __init__(self):
        super().__init__()
        self.calls = torch.zeros((), dtype=torch.int64)

    def forward(self, edges):
        self.calls.add_(1)
        return {"m": edges.src["h"].sin() * (self.calls > 0)}


def what_a_function_changes_itself(graph, data):
    """It is no constant, whose change would be an error."""
    x, message = data.leaf("x"), Counting()
    graph.ndata["h"] = x
    for name in ("first", "second"):
        graph.update_all(message, fn.sum("m", name))
    loss = weighted_sum(graph.ndata.pop("first") + graph.ndata.pop("second"), data.nodes["cotangent"])
    loss.backward(retain_graph=True)
    loss.backward()
    return {"node x.grad": x.grad}


@pytest.mark.parametrize("world_size", [2])
def test_a_function_may_change_what_is_its_own(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    check(pool, parts, random_data(parts, torch.float64), [(what_a_function_changes_itself, ())])


def transforms(mine):
    """What transforms of torch.func and forward mode say of distributed calls; whether a functional call is right."""
    sar.Config.timeout = 20
    graph, x = build(mine[0], 1), mine[1].nodes["x"]
    layer, edges = dgl.nn.SAGEConv(6, 3, "mean").double(), sar.pyg.edge_index(graph)
    sar.sync_params(layer)
    parameters = dict(layer.named_parameters())

    def call(parameters, x):
        return torch.func.functional_call(layer, parameters, (graph, x))

    def python_messages(x):
        graph.ndata["h"] = x
        graph.update_all(lambda edges: {"m": edges.src["h"]}, fn.sum("m", "out"))
        return graph.ndata["out"]

    def forward_mode():
        with forward_ad.dual_level():
            call(parameters, forward_ad.make_dual(x, x))

    scores = torch.ones(graph.num_edges()).double()
    cases = [
        lambda: torch.func.grad(lambda p: call(p, x).sum())(parameters),
        lambda: torch.func.jvp(lambda p: call(p, x), (parameters,), (parameters,)),
        lambda: torch.func.vmap(partial(call, parameters))(torch.stack([x, x])),
        lambda: torch.func.grad(lambda x: SimpleConv()(x, edges).sum())(x),
        lambda: torch.func.grad(lambda x: python_messages(x).sum())(x),
        lambda: torch.func.grad(lambda x: sar.all_sum(x).sum())(x),
        lambda: torch.func.vmap(sar.all_max)(x[:1]),
        lambda: torch.func.grad(lambda w: sar.edge_softmax(graph, w).sum())(scores),
        forward_mode,
    ]
    said = [catch_and_recover(case) for case in cases]
    return said, torch.equal(call(parameters, x), layer(graph, x))


@pytest.mark.parametrize("world_size", [2])
def test_transforms_of_torch_func_are_refused_by_name(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    for said, right in pool.run(transforms, per_rank=deal(parts, random_data(parts, torch.float64))):
        assert right
        for failure in said:
            assert failure.kind == "ConfigError", failure
            assert "torch.func" in failure.message, failure
            assert "functional_call works" in failure.message, failure
