"""Values that are easily mistreated: ties, NaN, infinities, empty reductions, half precision."""

import dgl.function as fn
import pytest
import torch

from tests.graphs import EdgeList, partition_in_memory
from tests.parity.harness import Data, check, run_everywhere, weighted_sum
from tests.parity.scenarios import SCENARIOS
from tests.parity.test_messages import REDUCERS, aggregate

MESSAGES = ("copy_u", "copy_e", "u_mul_e", "e_sub_v", "u_add_v")


def message_data(parts, draw):
    """Fields u, v and e and cotangents, all of width 3, from `draw(rows, seed)`."""
    nodes, edges = parts.num_nodes, len(parts.src)
    return Data(
        {"u": draw(nodes, 0), "v": draw(nodes, 1), "cotangent": normal(nodes, 3)},
        {"e": draw(edges, 2), "cotangent": normal(edges, 4)},
    )


def normal(rows, seed):
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed))


def few_values(rows, seed):
    """-1, 0 or 1."""
    return torch.randint(-1, 2, (rows, 3), generator=torch.Generator().manual_seed(seed)).float()


def with_nan(rows, seed):
    return normal(rows, seed).masked_fill(few_values(rows, seed + 10) > 0, torch.nan)


def with_infinities(rows, seed):
    chosen = few_values(rows, seed + 10)
    return normal(rows, seed).masked_fill(chosen > 0, torch.inf).masked_fill(chosen < 0, -torch.inf)


def only_infinities(rows, seed):
    return torch.full((rows, 3), -torch.inf if seed % 2 else torch.inf)


@pytest.mark.parametrize("draw", [with_nan, with_infinities, only_infinities], ids=lambda f: f.__name__)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_values(pool, world_size, draw):
    parts = SCENARIOS["isolated"](world_size)
    cases = [(aggregate, (message, reducer, "uve")) for message in MESSAGES for reducer in ("sum", "mean", None)]
    # Gradients of the others are told below: DGL makes NaN of a masked maximum's 0 times an infinite factor.
    cases += [(aggregate, (message, reducer, "")) for message in MESSAGES for reducer in ("max", "min")]
    check(pool, parts, message_data(parts, draw), cases)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ties(pool, world_size):
    parts = SCENARIOS["isolated"](world_size)
    cases = [(aggregate, (message, reducer, "uve", True)) for message in MESSAGES for reducer in ("max", "min")]
    check(pool, parts, message_data(parts, few_values), cases, visible_order=True)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_infinite_maximum_is_zero_and_takes_no_gradient(pool, world_size):
    """Said without DGL: node 0 has an infinite message, node 1 a NaN besides a number, node 2 numbers."""
    src, dst = torch.tensor([3, 4, 3, 4, 3, 4]), torch.tensor([0, 0, 1, 1, 2, 2])
    parts = partition_in_memory(EdgeList(src, dst, 5), torch.tensor([0, 0, 0, 0, world_size - 1]), world_size)
    weights = torch.tensor([torch.inf, 2.0, torch.nan, 2.0, 2.0, 3.0])[parts.edge_ids, None]
    data = Data(
        {"u": torch.ones(5, 1), "v": torch.ones(5, 1), "cotangent": torch.ones(5, 1)},
        {"e": weights, "cotangent": torch.ones(6, 1)},
    )
    for (result,) in run_everywhere(pool, parts, data, [(aggregate, ("u_mul_e", "max", "ue"))]).values():
        assert result["node result"].flatten().tolist() == [0, 2, 3, 0, 0]
        taken = dict(zip(parts.edge_ids.tolist(), result["edge e.grad"].flatten().tolist(), strict=True))
        assert taken == {0: 0, 1: 0, 2: 0, 3: 1, 4: 0, 5: 1}
        assert result["node u.grad"].flatten().tolist() == [0, 0, 0, 0, 5]


def applied(graph, data, reducer):
    """What an apply function sees of nodes without messages, and what becomes of it and of its input."""
    u = data.leaf("u")
    graph.ndata["h"] = u
    graph.update_all(
        fn.copy_u("h", "m"),
        getattr(fn, reducer)("m", "h"),
        lambda nodes: {"first": nodes.data["h"] + 1, "second": nodes.data["h"] * 2},
    )
    first, second, h = (graph.ndata[name] for name in ("first", "second", "h"))
    weighted_sum(first + second.clamp(-9, 9), data.nodes["cotangent"]).backward()
    return {"node first": first, "node second": second, "node h": h, "node u.grad": u.grad}


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_function_that_is_applied_to_the_result(pool, world_size):
    parts = SCENARIOS["isolated"](world_size)
    check(pool, parts, message_data(parts, normal), [(applied, (reducer,)) for reducer in ("sum", "max", "min")])


@pytest.mark.parametrize("scenario", ["isolated", "no edges"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_nothing_reduces_to_zero(pool, world_size, scenario):
    """Said without DGL: rows without messages are 0 and take no gradient."""
    parts = SCENARIOS[scenario](world_size)
    without = torch.bincount(parts.dst, minlength=parts.num_nodes) == 0
    assert without.any()
    data = message_data(parts, lambda rows, seed: normal(rows, seed).abs() + 1)
    results = run_everywhere(pool, parts, data, [(aggregate, ("u_add_v", reducer, "uv")) for reducer in REDUCERS])
    for by_reducer in results.values():
        for result in by_reducer:
            assert (result["node result"][without] == 0).all()
            assert (result["node result"][~without] != 0).all()
            assert (result["node v.grad"][without] == 0).all()
            assert result["node u.grad"].any() == (scenario == "isolated")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_half_precision_is_rounded_once(pool, world_size, dtype):
    """Against float32 DGL on the same inputs; the tolerance is two units of the dtype's own round-off."""
    parts = SCENARIOS["random"](world_size)
    exact = message_data(parts, lambda rows, seed: normal(rows, seed).to(dtype).float())
    exact.nodes["cotangent"] = exact.nodes["cotangent"].to(dtype).float()
    exact.edges["cotangent"] = exact.edges["cotangent"].to(dtype).float()
    data = Data({k: v.to(dtype) for k, v in exact.nodes.items()}, {k: v.to(dtype) for k, v in exact.edges.items()})
    binary = ("u_mul_e", "u_add_v", "v_sub_e", "u_dot_v")
    copies = ("copy_u", "copy_e")
    cases = [(aggregate, (copy, reducer, "uve", True)) for copy in copies for reducer in (*REDUCERS, None)]
    cases += [(aggregate, (message, reducer, "uve")) for message in binary for reducer in ("sum", "mean", None)]
    # Which of two messages is larger may depend on their rounding, and with it where the gradient goes.
    cases += [(aggregate, (message, reducer, "")) for message in binary for reducer in ("max", "min")]
    tolerance = 2 * torch.finfo(dtype).eps
    check(pool, parts, data, cases, reference_data=exact, tolerance=tolerance, visible_order=True)
