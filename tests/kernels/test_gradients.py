"""Gradients of operands against autograd through the plain loops of the oracle."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sar.kernels import EdgeMessage, EdgeOperand, Op, Target, aggregate_grad, operand_values_needed
from tests.kernels import oracle

U, V, E = Target.U, Target.V, Target.E
DTYPES = [torch.float32, torch.float32, torch.float64, torch.bfloat16]
DERIVATIVES = [(op, wrt) for op in oracle.OPS for wrt in ("lhs", "rhs") if (op, wrt) != ("copy_lhs", "rhs")]
ATTEMPTS = 4 * settings.default.max_examples

pytestmark = pytest.mark.usefixtures("implementation", "num_threads")


def messages(case: oracle.Operation) -> tuple[Tensor, list[Tensor]]:
    """The operand in question as a leaf, and the messages that depend on it."""
    lhs, rhs = (operand.double().requires_grad_() for operand in (case.lhs, case.rhs))
    values = oracle.messages(case.graph, case.op, lhs, case.lhs_target, rhs, case.rhs_target)
    return (lhs if case.wrt == "lhs" else rhs), values


def check(
    case: oracle.Operation, grad: Tensor, grad_target: Target, arg: Tensor | None, leaf: Tensor, loss: Tensor
) -> None:
    """Compare the kernel's gradient, added to what is there, with that of the loss by autograd."""
    loss.backward()
    expected = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    operand = case.lhs if case.wrt == "lhs" else case.rhs
    dtype = torch.promote_types(operand.dtype, torch.float32)
    start = oracle.draw_values(7, len(operand), tuple(operand.shape[1:]), dtype).contiguous()
    fresh = case.seed % 2 == 0 and any(tile[:2] == (0, case.graph.num_src) for tile in case.tiles[:1])
    out = start.fill_(0).new_full(start.shape, torch.nan) if fresh else start.clone()
    needs_lhs, needs_rhs = operand_values_needed(Op(case.op), case.wrt)
    target = case.lhs_target if case.wrt == "lhs" else case.rhs_target
    for i, tile in enumerate(case.tiles):
        lhs = oracle.rows_of_tile(case.lhs, case.lhs_target, tile) if needs_lhs else None
        rhs = oracle.rows_of_tile(case.rhs, case.rhs_target, tile) if needs_rhs else None
        message = EdgeMessage(
            Op(case.op),
            EdgeOperand(lhs, case.lhs_target, tuple(case.lhs.shape[1:])),
            None if case.op == "copy_lhs" else EdgeOperand(rhs, case.rhs_target, tuple(case.rhs.shape[1:])),
        )
        tile_out = oracle.rows_of_tile(out, target, tile)
        gradient = EdgeOperand.of(grad, grad_target)
        aggregate_grad(tile[2], message, case.wrt, gradient, tile_out, arg=arg, fresh=fresh and i == 0)
    torch.testing.assert_close(out.double(), start.double() + expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=ATTEMPTS)
@given(oracle.operations(DTYPES))
def test_of_sum(case: oracle.Operation) -> None:
    leaf, values = messages(case)
    grad = oracle.draw_values(case.seed + 2, case.graph.num_dst, case.shape, case.lhs.dtype)
    total = oracle.aggregated_sum(case.graph, values, case.shape)
    check(case, grad, V, None, leaf, (total * grad.double()).sum() + 0 * leaf.sum())


@pytest.mark.parametrize(("op", "wrt"), DERIVATIVES)
def test_of_every_operation(op: str, wrt: str) -> None:
    """Random cases may leave one out."""
    graph = oracle.make_graph([(0, 0), (1, 0), (1, 1), (2, 1)], 3, 2)
    tiles = [(begin, begin + 1, graph.block.select_sources(begin, begin + 1)) for begin in range(3)]
    for lhs_target, rhs_target in product(Target, repeat=2):
        lhs = oracle.draw_values(1, graph.rows(lhs_target), (3,), torch.float32)
        rhs = oracle.draw_values(2, graph.rows(rhs_target), (3,), torch.float32, "nonzero")
        case = oracle.Operation(graph, tiles, op, lhs, lhs_target, rhs, rhs_target, 0, wrt)
        leaf, values = messages(case)
        grad = oracle.draw_values(3, graph.num_dst, case.shape, torch.float32)
        total = oracle.aggregated_sum(graph, values, case.shape)
        check(case, grad, V, None, leaf, (total * grad.double()).sum())


@settings(max_examples=ATTEMPTS)
@given(oracle.operations(DTYPES))
def test_of_edges(case: oracle.Operation) -> None:
    leaf, values = messages(case)
    grad = oracle.draw_values(case.seed + 2, case.graph.num_edge_rows, case.shape, case.lhs.dtype)
    loss = sum(((m * grad[row].double()).sum() for row, m in zip(case.graph.ids, values, strict=True)), 0 * leaf.sum())
    check(case, grad, E, None, leaf, loss)


@settings(max_examples=ATTEMPTS)
@given(case=oracle.operations(DTYPES, "few"), largest=st.booleans())
def test_of_maximum_and_minimum(case: oracle.Operation, largest: bool) -> None:
    leaf, values = messages(case)
    grad = oracle.draw_values(case.seed + 2, case.graph.num_dst, case.shape, case.lhs.dtype)
    best, arg = oracle.aggregated_best(case.graph, values, case.shape, largest)
    loss = (best.where(arg >= 0, 0) * grad.double()).sum()
    check(case, grad, V, arg.to(torch.int32), leaf, loss + 0 * leaf.sum())


def test_an_operand_that_is_broadcast_gets_all_of_its_gradient() -> None:
    """Also if the result has no values before."""
    graph = oracle.make_graph([(0, 0), (1, 0), (1, 1)], 3, 2)
    x, y, grad = torch.ones(3, 1, 4), torch.ones(2, 3, 4), torch.arange(24.0).view(2, 3, 4)
    out = torch.full_like(x, torch.nan)
    operand = EdgeOperand.of(grad, V)
    aggregate_grad(graph.block, oracle.message("add", x, U, y, V), "lhs", operand, out, fresh=True)
    first, second = grad.sum(1, keepdim=True)
    assert torch.equal(out, torch.stack([first, first + second, 0 * first]))


inf = torch.inf


@pytest.mark.parametrize(("op", "operand", "expected"), (("mul", [-inf, 2.0], [2.0]), ("div", [-1e-45, 2.0], [0.5])))
def test_losers_do_not_reach_the_gradient(op: str, operand: list[float], expected: list[float]) -> None:
    """0 times the infinite derivative of an edge that was not the maximum would be NaN."""
    graph = oracle.make_graph([(0, 0), (0, 0)], 1, 1)
    rhs, out, arg = torch.tensor(operand), torch.zeros(1), torch.tensor([1], dtype=torch.int32)
    message = EdgeMessage(Op(op), EdgeOperand(None, U, ()), EdgeOperand.of(rhs, E))
    aggregate_grad(graph.block, message, "lhs", EdgeOperand.of(torch.ones(1), V), out, arg=arg)
    assert out.tolist() == expected


def test_nan_and_infinity_reach_the_gradient() -> None:
    graph = oracle.make_graph([(0, 0), (1, 0), (2, 0)], 3, 1)
    out = torch.zeros(3, 1)
    rhs = torch.tensor([[torch.nan], [inf], [0.0]])
    message = EdgeMessage(Op.MUL, EdgeOperand(None, U, (1,)), EdgeOperand.of(rhs, E))
    aggregate_grad(graph.block, message, "lhs", EdgeOperand.of(torch.full((1, 1), inf), V), out)
    torch.testing.assert_close(out, torch.tensor([[torch.nan], [inf], [torch.nan]]), equal_nan=True)


def test_zero_divisors_of_no_edge_are_left_alone() -> None:
    graph = oracle.make_graph([(0, 0)], 2, 2)
    x, out = torch.tensor([[2.0], [0.0]]), torch.zeros(2, 1)
    message = oracle.message("div", x, V, x, U)
    aggregate_grad(graph.block, message, "rhs", EdgeOperand.of(torch.ones(2, 1), V), out)
    assert out.tolist() == [[-0.5], [0.0]]
