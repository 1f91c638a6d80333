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
from tests.parity.harness import Data, check

REDUCERS = ("sum", "mean", "max", "min")
PAIRS = ("u{}e", "e{}u", "u{}v", "v{}u", "v{}e", "e{}v")
OPERATORS = ("add", "sub", "mul", "div", "dot")
SETTINGS = [{}, {"comm_buffer_bytes": 512}, {"pipeline_depth": 0}, {"pipeline_depth": 3, "max_collective_size": 16}]


def aggregate(graph, data, message, reducer, wants_gradient):
    """`update_all` with built-ins, or `apply_edges` where there is no reducer."""
    fields = operands(graph, data, message, wants_gradient)
    if reducer is None:
        graph.apply_edges(describe(message, fields))
        result, kind = graph.edata.pop("m"), "edge"
    else:
        graph.update_all(describe(message, fields), reducer_of(graph, reducer)("m", "out"))
        result, kind = graph.dstdata.pop("out"), "node"
    results = {f"{kind} result": result}
    if any(field.requires_grad for field in fields.values()):
        cotangent = data.nodes["cotangent"] if kind == "node" else data.edges["cotangent"]
        flat = result.reshape(len(result), result.shape[1:].numel())
        (flat * cotangent[:, : flat.shape[1]]).sum().backward()
    for name, field in fields.items():
        if field.requires_grad:
            results[f"{'edge' if name == 'e' else 'node'} {name}.grad"] = field.grad
    return results


def reducer_of(graph, name):
    """The built-in reducer; for a reference without edges a sum, as DGL sends a maximum's gradient to node 0 there."""
    return fn.sum if isinstance(graph, dgl.DGLGraph) and graph.num_edges() == 0 else getattr(fn, name)


def operands(graph, data, message, wants_gradient):
    """Set the fields that the message reads, as fresh leaves, and return them."""
    fields = {}
    for target in (part for part in message.split("_") if part in ("u", "v", "e")):
        values = (data.edges if target == "e" else data.nodes)[target]
        fields[target] = values.clone().requires_grad_(target in wants_gradient)
        frame = {"u": graph.srcdata, "v": graph.dstdata, "e": graph.edata}[target]
        frame[target] = fields[target]
    return fields


def describe(message, fields):
    return getattr(fn, message)(*fields, "m")


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
    shapes = draw(mutually_broadcastable_shapes(num_shapes=3, max_dims=3, max_side=3)).input_shapes
    if operator == "dot":
        last = draw(st.integers(1, 4))
        shapes = tuple((*shape[:2], last) for shape in shapes)
    return shapes


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
    return parts, data, wants_gradient, draw(st.sampled_from(SETTINGS))


@pytest.mark.parametrize("operator", ["copy", *OPERATORS])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_messages(pool, world_size, operator):
    messages = ["copy_u", "copy_e"] if operator == "copy" else [pair.format(f"_{operator}_") for pair in PAIRS]

    @settings(max_examples=5)
    @given(inputs(world_size, operator))
    def property_holds(drawn):
        parts, data, wants_gradient, config = drawn
        cases = [
            (aggregate, (message, reducer, wants_gradient)) for message in messages for reducer in (*REDUCERS, None)
        ]
        check(pool, parts, data, cases, settings=config)

    property_holds()


def test_every_message_function_of_dgl_is_covered():
    offered = {name for name in dir(fn) if name.startswith("copy_") or re.fullmatch("[uve]_[a-z]+_[uve]", name)}
    covered = {"copy_u", "copy_e"} | {pair.format(f"_{operator}_") for pair in PAIRS for operator in OPERATORS}
    assert covered == offered
