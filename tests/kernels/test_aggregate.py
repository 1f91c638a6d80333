"""Sums, maxima, minima and per-edge results against the plain loops of the oracle."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sar.errors import GraphError
from sar.kernels import (
    EdgeBlock,
    EdgeOperand,
    Target,
    add_rows,
    aggregate_cmp,
    aggregate_grad,
    aggregate_sum,
    edge_apply,
)
from tests.kernels import oracle

U, V, E = Target.U, Target.V, Target.E
DTYPES = [torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16]
nan, inf = torch.nan, torch.inf
ATTEMPTS = 3 * settings.default.max_examples

pytestmark = pytest.mark.usefixtures("implementation", "num_threads")


def arguments(case: oracle.Operation, tile: oracle.Tile) -> tuple[Any, ...]:
    lhs = oracle.rows_of_tile(case.lhs, case.lhs_target, tile)
    rhs = None if case.op == "copy_lhs" else oracle.rows_of_tile(case.rhs, case.rhs_target, tile)
    return tile[2], oracle.message(case.op, lhs, case.lhs_target, rhs, case.rhs_target)


def expected_messages(case: oracle.Operation) -> list[Tensor]:
    lhs, rhs = case.lhs.double(), case.rhs.double()
    return oracle.messages(case.graph, case.op, lhs, case.lhs_target, rhs, case.rhs_target)


def sum_dtype(case: oracle.Operation) -> torch.dtype:
    return torch.promote_types(case.lhs.dtype, torch.float32)


@settings(max_examples=ATTEMPTS)
@given(oracle.operations(DTYPES), st.booleans())
def test_sum(case: oracle.Operation, fresh: bool) -> None:
    start = oracle.draw_values(5, case.graph.num_dst, case.shape, sum_dtype(case))
    out = start.fill_(0).new_full(start.shape, nan) if fresh and case.tiles else start.clone()
    for i, tile in enumerate(case.tiles):
        aggregate_sum(*arguments(case, tile), out, fresh=fresh and i == 0)
    expected = start.double() + oracle.aggregated_sum(case.graph, expected_messages(case), case.shape)
    torch.testing.assert_close(out, expected.to(out.dtype), rtol=1e-5, atol=1e-5)


def test_rows_without_edges_become_zero() -> None:
    """Before, between and after the others, if the result has no values before."""
    graph = oracle.make_graph([(0, 1), (1, 1), (2, 4)], 3, 6)
    x, out = torch.arange(60.0).view(3, 20), torch.full((6, 20), nan)
    aggregate_sum(graph.block, oracle.message("copy_lhs", x, U, None, V), out, fresh=True)
    zero = torch.zeros(20)
    assert torch.equal(out, torch.stack([zero, x[0] + x[1], zero, zero, x[2], zero]))


@pytest.mark.parametrize("largest", (True, False))
@settings(max_examples=ATTEMPTS)
@given(case=oracle.operations(DTYPES, "few"))
def test_maximum_and_minimum(case: oracle.Operation, largest: bool) -> None:
    graph, shape = case.graph, case.shape
    out = torch.full((graph.num_dst, *shape), -torch.inf if largest else torch.inf, dtype=sum_dtype(case))
    arg = torch.full(out.shape, -1, dtype=torch.int32)
    for tile in case.tiles:
        aggregate_cmp(*arguments(case, tile), out, arg, largest)
    messages = [message.to(out.dtype).double() for message in expected_messages(case)]
    best, winner = oracle.aggregated_best(graph, messages, shape, largest)
    torch.testing.assert_close(out, best.to(out.dtype), rtol=1e-6, atol=1e-6)
    # Of dot products and quotients, whose round-off depends on order, equal ones need not be equal in the last bit.
    if case.op not in ("dot", "div"):
        assert arg.tolist() == winner.tolist()


@settings(max_examples=ATTEMPTS)
@given(oracle.operations(DTYPES))
def test_edge_apply(case: oracle.Operation) -> None:
    start = oracle.draw_values(5, case.graph.num_edge_rows, case.shape, sum_dtype(case))
    out = start.clone()
    for tile in case.tiles:
        edge_apply(*arguments(case, tile), out)
    expected = start.clone()  # rows of no edge stay
    for row, message in zip(case.graph.ids, expected_messages(case), strict=True):
        expected[row] = message
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_half_result_of_edges() -> None:
    graph = oracle.make_graph([(0, 0)], 1, 1)
    x = torch.full((1, 4096), 1 / 64, dtype=torch.float16)
    out = torch.empty(2, 1, dtype=torch.float16)
    edge_apply(graph.block, oracle.message("dot", x, U, x, V), out)
    assert out[0].item() == 1.0  # the sum of 4096 terms of 2**-12 stalls when it is itself a float16


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_half_is_summed_in_single_precision(dtype: torch.dtype) -> None:
    graph = oracle.make_graph([(0, 0)] * 5000, 1, 1)
    out = torch.zeros(1, 2)
    aggregate_sum(graph.block, oracle.message("copy_lhs", torch.ones(1, 2, dtype=dtype), U), out)
    assert out.tolist() == [[5000.0, 5000.0]]


def test_integers_can_be_copied() -> None:
    graph = oracle.make_graph([(0, 1), (1, 1), (2, 1)], 3, 2)
    x = torch.tensor([[2**40], [7], [2**40]])
    out = torch.zeros(2, 1, dtype=torch.int64)
    aggregate_sum(graph.block, oracle.message("copy_lhs", x, U), out)
    assert out.tolist() == [[0], [2**41 + 7]]
    best, arg = torch.full((2, 1), torch.iinfo(torch.int64).min), torch.full((2, 1), -1)
    aggregate_cmp(graph.block, oracle.message("copy_lhs", x, U), best, arg, True)
    assert best[1].item() == 2**40
    assert arg.tolist() == [[-1], [2]]


def test_sum_keeps_nan_and_infinity() -> None:
    graph = oracle.make_graph([(0, 0), (1, 0), (2, 1), (0, 2), (0, 2), (2, 3), (0, 3)], 3, 4)
    out = torch.zeros(4, 1)
    aggregate_sum(graph.block, oracle.message("copy_lhs", torch.tensor([[1.0], [nan], [inf]]), U), out)
    torch.testing.assert_close(out, torch.tensor([[nan], [inf], [2.0], [inf]]), equal_nan=True)
    out = torch.zeros(4, 1)
    x = torch.tensor([[1.0], [-inf], [inf]])
    aggregate_sum(graph.block, oracle.message("mul", x, U, torch.tensor([[-1.0]] * 4), V), out)
    torch.testing.assert_close(out, torch.tensor([[inf], [-inf], [-2.0], [-inf]]))
    graph = oracle.make_graph([(0, 0), (1, 0)], 2, 1)
    aggregate_sum(graph.block, oracle.message("copy_lhs", torch.tensor([[inf], [-inf]]), U), out := torch.zeros(1, 1))
    assert out.isnan().all()


def test_division_by_zero() -> None:
    graph = oracle.make_graph([(0, 0), (1, 0), (2, 0)], 3, 1)
    out = torch.zeros(4, 1)
    edge_apply(graph.block, oracle.message("div", torch.tensor([[1.0], [-1.0], [0.0]]), U, torch.zeros(1, 1), V), out)
    torch.testing.assert_close(out[:3], torch.tensor([[inf], [-inf], [nan]]), equal_nan=True)


@pytest.mark.parametrize("width", (1, 40))
@pytest.mark.parametrize("largest", (True, False))
def test_maximum_ignores_nan_and_keeps_infinity(largest: bool, width: int) -> None:
    sign = 1.0 if largest else -1.0
    values = sign * torch.tensor([[nan], [1.0], [-inf], [inf], [2.0]]).expand(5, width)
    edges = [(0, 0), (1, 0), (0, 0), (0, 1), (2, 2), (2, 2), (1, 3), (3, 3), (4, 3), (2, 4), (0, 4)]
    graph = oracle.make_graph(edges, 5, 6)
    out, arg = torch.full((6, width), -sign * inf), torch.full((6, width), -1, dtype=torch.int64)
    aggregate_cmp(graph.block, oracle.message("copy_lhs", values, U), out, arg, largest)
    assert (sign * out[:, 0]).tolist() == [1.0, -inf, -inf, inf, -inf, -inf]
    assert arg[:, 0].tolist() == [1, -1, 5, 7, 9, -1]
    assert torch.equal(out, out[:, :1].expand_as(out))
    assert torch.equal(arg, arg[:, :1].expand_as(arg))


@pytest.mark.parametrize("order", ((0, 1), (1, 0)))
def test_last_edge_wins_whatever_the_order_of_blocks(order: tuple[int, int]) -> None:
    graph = oracle.make_graph([(0, 0), (1, 0), (0, 0), (1, 0), (0, 0)], 2, 1, ids=[3, 9, 4, 1, 2])
    tiles = [graph.block.select_sources(0, 1), graph.block.select_sources(1, 2)]
    out, arg = torch.full((1, 1), -inf), torch.full((1, 1), -1, dtype=torch.int32)
    for i in order:
        aggregate_cmp(tiles[i], oracle.message("copy_lhs", torch.ones(1, 1), U), out, arg, True)
    assert arg.item() == 9


def test_wide_indices() -> None:
    block = oracle.make_graph([(0, 0), (1, 1), (1, 0)], 2, 2, ids=[2, 0, 1]).block
    wide = EdgeBlock(block.rows, block.indptr.long(), block.cols, 2, 2, block.edge_ids.long())
    x, w = torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0], [20.0], [30.0]])
    out = torch.zeros(2, 1)
    aggregate_sum(wide, oracle.message("mul", x, U, w, E), out)
    assert out.tolist() == [[1 * 30 + 2 * 10], [2 * 20]]


def test_operands_that_do_not_fit_are_refused() -> None:
    block = oracle.make_graph([(0, 0), (1, 1)], 2, 2).block
    with pytest.raises(GraphError, match="expected"):
        aggregate_sum(block, oracle.message("copy_lhs", torch.ones(1, 1), U), torch.zeros(2, 1))
    with pytest.raises(GraphError, match="expected"):
        aggregate_sum(block, oracle.message("copy_lhs", torch.ones(1, 1), E), torch.zeros(2, 1))
    for out in (torch.zeros(2, 2), torch.zeros(2, 2)[:, :1]):
        with pytest.raises(GraphError, match="expected"):
            aggregate_sum(block, oracle.message("copy_lhs", torch.ones(2, 1), U), out)
    message = oracle.message("copy_lhs", torch.ones(2, 3), U)
    with pytest.raises(GraphError, match="edge IDs"):
        aggregate_cmp(block, message, torch.zeros(2, 3), torch.zeros(1, 3, dtype=torch.int32), True)
    for gradient in (torch.ones(2, 1), torch.ones(1, 3)):
        with pytest.raises(GraphError, match="expected"):
            aggregate_grad(block, message, "lhs", EdgeOperand.of(gradient, V), torch.zeros(2, 3))
    with pytest.raises(GraphError, match="rows of edges or destinations"):
        aggregate_grad(block, message, "lhs", EdgeOperand.of(torch.ones(2, 3), U), torch.zeros(2, 3))
    gradient = EdgeOperand.of(torch.ones(2, 3), V)
    with pytest.raises(GraphError, match="edge IDs"):
        aggregate_grad(block, message, "lhs", gradient, torch.zeros(2, 3), arg=torch.zeros(1, 3, dtype=torch.int32))
    of_edges = EdgeOperand.of(torch.ones(2, 3), E)
    with pytest.raises(GraphError, match="maximum"):
        aggregate_grad(block, message, "lhs", of_edges, torch.zeros(2, 3), arg=torch.zeros(2, 3, dtype=torch.int32))
    for values in (torch.ones(1, 3), torch.ones(2, 2)):
        with pytest.raises(GraphError, match="rows to add"):
            add_rows(torch.arange(2), values, torch.zeros(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,), (2, 45), (0,)])
def test_rows_are_added_where_they_belong(dtype, shape):
    """Also no rows at all."""
    for index_type in (torch.int32, torch.int64):
        for rows in (torch.tensor([4, 0, 2], dtype=index_type), torch.tensor([], dtype=index_type)):
            out = torch.randn(5, *shape).to(dtype)
            values = torch.randn(len(rows), *shape).to(dtype)
            expected = out.clone()
            for row, value in zip(rows.tolist(), values, strict=True):
                expected[row] += value
            add_rows(rows, values, out)
            torch.testing.assert_close(out, expected, rtol=0, atol=0)
