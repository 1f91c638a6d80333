"""Every built-in message function with every reducer and through apply_edges, against DGL, with all gradients.

Graph, partitioning, broadcasting shapes, dtype, values (with ties or without) and who takes a gradient are drawn; each
drawn setting runs all orders of the operands, all reducers and all modes.
"""

import re

import dgl
import dgl.function as fn
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import mutually_broadcastable_shapes
from torch import Tensor

from tests.graphs import partition_in_memory, random_graph
from tests.matrix import corner
from tests.parity.harness import Data, assert_close, check, extremum, run_program, weighted_sum

REDUCERS = ("sum", "mean", "max", "min")
PAIRS = ("u{}e", "e{}u", "u{}v", "v{}u", "v{}e", "e{}v")
OPERATORS = ("add", "sub", "mul", "div", "dot")
SETTINGS = [{}, {"comm_buffer_bytes": 512}, {"pipeline_depth": 0}, {"pipeline_depth": 3, "max_collective_size": 16}]


def aggregate(graph, data, message, reducer, wants_gradient, ties=False):
    """`update_all` with built-ins, or `apply_edges` where there is no reducer."""
    fields = operands(graph, data, message, wants_gradient)
    function = getattr(fn, message)(*fields, "m")
    if reducer is None:
        graph.apply_edges(function)
        result, kind = graph.edata.pop("m"), "edge"
    elif isinstance(graph, dgl.DGLGraph) and reducer in ("max", "min") and (ties or graph.num_edges() == 0):
        result, kind = extremum(graph, function, reducer), "node"
    else:
        graph.update_all(function, getattr(fn, reducer)("m", "out"))
        result, kind = graph.dstdata.pop("out"), "node"
    results = {f"{kind} result": result}
    if any(field.requires_grad for field in fields.values()):
        cotangent = data.nodes["cotangent"] if kind == "node" else data.edges["cotangent"]
        weighted_sum(result, cotangent).backward()
    for name, field in fields.items():
        if field.requires_grad:
            results[f"{'edge' if name == 'e' else 'node'} {name}.grad"] = field.grad
    return results


def operands(graph, data, message, wants_gradient):
    """Set the fields that the message reads, as fresh leaves, and return them."""
    fields = {}
    for target in (part for part in message.split("_") if part in ("u", "v", "e")):
        values = (data.edges if target == "e" else data.nodes)[target]
        fields[target] = values.clone().requires_grad_(target in wants_gradient)
        frame = {"u": graph.srcdata, "v": graph.dstdata, "e": graph.edata}[target]
        frame[target] = fields[target]
    return fields


@st.composite
def cut_graphs(draw, workers: int):
    num_nodes = draw(st.integers(1, 16))
    spare = draw(st.integers(0, num_nodes - 1))
    graph = random_graph(
        draw(st.integers(0, 1000)),
        num_nodes,
        draw(st.sampled_from([0, 1, 2, 8, 30, 60])),
        self_loops=draw(st.booleans()),
        multi_edges=draw(st.booleans()),
        isolated=spare // 2,
        no_in_edges=spare - spare // 2,
    )
    assignment = draw(st.lists(st.integers(0, workers - 1), min_size=num_nodes, max_size=num_nodes))
    return partition_in_memory(graph, torch.tensor(assignment), workers)


@st.composite
def feature_shapes(draw, operator: str) -> tuple[tuple[int, ...], ...]:
    """Shapes of u, v and e behind their first dimension, each able to meet each."""
    if operator != "dot":
        return draw(mutually_broadcastable_shapes(num_shapes=3, max_dims=3, max_side=3)).input_shapes
    shapes = draw(mutually_broadcastable_shapes(num_shapes=3, max_dims=2, max_side=3)).input_shapes
    last = draw(st.integers(1, 4))
    return tuple((*shape, last) for shape in shapes)


def values(shape: tuple[int, ...], ties: bool, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers away from 0 (they divide); with `ties`, powers of two, on which all operators are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    if ties:
        choices = torch.tensor([-2.0, -1.0, -0.5, 0.5, 1.0, 2.0], dtype=dtype)
        return choices[torch.randint(0, 6, shape, generator=generator)]
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (numbers + 0.5 * numbers.sign()).to(dtype)


@st.composite
def inputs(draw, workers: int, operator: str):
    parts = draw(cut_graphs(workers))
    u, v, e = draw(feature_shapes(operator))
    ties, seed = draw(st.booleans()), draw(st.integers(0, 1000))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    nodes, edges = parts.num_nodes, len(parts.src)
    data = Data(
        {
            "u": values((nodes, *u), ties, dtype, seed),
            "v": values((nodes, *v), ties, dtype, seed + 1),
            "cotangent": values((nodes, 81), False, dtype, seed + 2),
        },
        {"e": values((edges, *e), ties, dtype, seed + 3), "cotangent": values((edges, 81), False, dtype, seed + 4)},
    )
    wants_gradient = draw(st.sampled_from(["uve", "u", "v", "e", "ue", "uv", "ve"]))
    return parts, data, (wants_gradient, ties), draw(st.sampled_from(SETTINGS))


@pytest.mark.parametrize("operator", ["copy", *OPERATORS])
@pytest.mark.parametrize("world_size", [corner(1), corner(2), 3, corner(4)])
def test_messages(pool, world_size, operator):
    messages = ["copy_u", "copy_e"] if operator == "copy" else [pair.format(f"_{operator}_") for pair in PAIRS]

    @settings(max_examples=5)
    @given(inputs(world_size, operator))
    def property_holds(drawn):
        parts, data, options, config = drawn
        cases = [(aggregate, (message, reducer, *options)) for message in messages for reducer in (*REDUCERS, None)]
        check(pool, parts, data, cases, settings=config, visible_order=True)

    property_holds()


def test_every_message_function_of_dgl_is_covered():
    offered = {name for name in dir(fn) if name.startswith("copy_") or re.fullmatch("[uve]_[a-z]+_[uve]", name)}
    covered = {"copy_u", "copy_e"} | {pair.format(f"_{operator}_") for pair in PAIRS for operator in OPERATORS}
    assert covered == offered


@pytest.mark.parametrize("message", ["copy_e", "u_mul_v", "u_sub_e"])
@pytest.mark.parametrize("reducer", ["max", "min"])
def test_the_reference_for_ties_is_dgl_where_there_are_none(message, reducer):
    graph = random_graph(7, 20, 80, isolated=3)
    parts = partition_in_memory(graph, torch.zeros(20, dtype=torch.int64), 1)
    data = Data(
        {name: values((20, 2, 3), False, torch.float64, seed) for seed, name in enumerate("uv")}
        | {"cotangent": values((20, 6), False, torch.float64, 3)},
        {"e": values((80, 2, 3), False, torch.float64, 4)},
    )
    ours = run_program(aggregate, parts.reference(), data, message, reducer, "uve", True)
    theirs = run_program(aggregate, parts.reference(), data, message, reducer, "uve", False)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert_close(ours[name], value)
