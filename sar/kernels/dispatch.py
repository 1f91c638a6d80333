"""The kernel interface: checks what is handed in and calls the implementation that fits it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor

import sar.kernels.meta as meta
from sar.kernels.backend import numba_kernels
from sar.kernels.edge_block import EdgeBlock
from sar.kernels.ops import Op, Operand, Shape, Target, message_shape
from sar.kernels.torch import aggregate


def aggregate_sum(
    block: EdgeBlock,
    op: Op | str,
    lhs: Tensor,
    lhs_target: Target,
    rhs: Tensor | None,
    rhs_target: Target,
    out: Tensor,
) -> None:
    """Add to each destination row of `out` the messages op(lhs, rhs) of its edges in the block.

    Args:
        block: the edges.
        op: an operator or its name.
        lhs: left operand, (rows of its target, *trailing shape).
        lhs_target: whose rows it has.
        rhs: right operand, likewise; None for copy.
        rhs_target: whose rows it has.
        out: (num_dst, *message shape), float32 where operands have a half precision.
    """
    op = Op(op)
    left, right = _operands(block, op, lhs, lhs_target, rhs, rhs_target, out, Target.V)
    if block.num_edges:
        with _contiguous(out) as (result,):
            _choose(out, lhs, rhs).aggregate_sum(block, op, left, right, result)


def aggregate_cmp(
    block: EdgeBlock,
    op: Op | str,
    lhs: Tensor,
    lhs_target: Target,
    rhs: Tensor | None,
    rhs_target: Target,
    out: Tensor,
    arg: Tensor,
    largest: bool,
) -> None:
    """Update the running maximum (minimum) of each destination with the messages of its edges in the block.

    Of equal messages that with the greatest edge ID wins, in whatever order blocks come. NaN never wins.

    Args:
        block: the edges.
        op: an operator or its name.
        lhs: left operand, (rows of its target, *trailing shape).
        lhs_target: whose rows it has.
        rhs: right operand, likewise; None for copy.
        rhs_target: whose rows it has.
        out: (num_dst, *message shape), -inf (+inf) at first, float32 where operands have a half precision.
        arg: like `out`, int32 or int64, -1 at first: the edge ID of the winner.
        largest: maximum rather than minimum.
    """
    op = Op(op)
    left, right = _operands(block, op, lhs, lhs_target, rhs, rhs_target, out, Target.V)
    assert arg.shape == out.shape
    if block.num_edges:
        with _contiguous(out, arg) as (result, winner):
            _choose(out, lhs, rhs).aggregate_cmp(block, op, left, right, result, winner, largest)


def edge_apply(
    block: EdgeBlock,
    op: Op | str,
    lhs: Tensor,
    lhs_target: Target,
    rhs: Tensor | None,
    rhs_target: Target,
    out: Tensor,
) -> None:
    """Write op(lhs, rhs) of every edge of the block to its row of `out`, (edges, *message shape)."""
    op = Op(op)
    left, right = _operands(block, op, lhs, lhs_target, rhs, rhs_target, out, Target.E)
    if block.num_edges:
        with _contiguous(out) as (result,):
            _choose(out, lhs, rhs).edge_apply(block, op, left, right, result)


def aggregate_grad(
    block: EdgeBlock,
    op: Op | str,
    wrt: str,
    lhs: Tensor | None,
    lhs_target: Target,
    rhs: Tensor | None,
    rhs_target: Target,
    grad: Tensor,
    grad_target: Target,
    arg: Tensor | None,
    out: Tensor,
    *,
    lhs_shape: Shape,
    rhs_shape: Shape | None = None,
) -> None:
    """Add to `out` the gradient of the messages' operand `wrt`, summed over the dimensions that it broadcasts.

    Args:
        block: the edges.
        op: the operator of the forward or its name.
        wrt: "lhs" or "rhs".
        lhs: left operand of the forward; may be None where `operand_values_needed` says so.
        lhs_target: whose rows it has.
        rhs: right operand, likewise.
        rhs_target: whose rows it has.
        grad: gradient of the messages, (edges, *message shape), or of their aggregation, (num_dst, *message shape).
        grad_target: E or V, accordingly.
        arg: winners of a maximum or minimum, like `grad`; only their elements contribute. None otherwise.
        out: (rows of the operand's target, *trailing shape of the operand), float32 where that has a half precision.
        lhs_shape: trailing shape of the left operand.
        rhs_shape: trailing shape of the right operand; None for copy.
    """
    op = Op(op)
    left = Operand(lhs, lhs_target, tuple(lhs_shape))
    right = None if rhs_shape is None else Operand(rhs, rhs_target, tuple(rhs_shape))
    gradient = Operand.of(grad, grad_target)
    operand = right if wrt == "rhs" else left
    assert operand is not None
    assert gradient.shape == message_shape(op, left.shape, None if right is None else right.shape)
    assert grad_target is not Target.U
    assert arg is None or (grad_target, arg.shape) == (Target.V, grad.shape)
    for given in (left, right, gradient, operand._replace(values=out)):
        _check_fits(block, given)
    if block.num_edges:
        with _contiguous(out) as (result,):
            _choose(out, grad, lhs, rhs).aggregate_grad(block, op, wrt, left, right, gradient, arg, result)


def add_rows(rows: Tensor, values: Tensor, out: Tensor) -> None:
    """Add (n, ...) values to `rows`, (n,) integer and all distinct, of `out`, in place."""
    assert len(rows) == len(values)
    assert values.shape[1:] == out.shape[1:]
    if values.numel():
        with _contiguous(out) as (result,):
            _choose(out, values).add_rows(rows, values, result)


@contextmanager
def _contiguous(*results: Tensor) -> Iterator[list[Tensor]]:
    """Contiguous tensors to write to in place of `results`."""
    stand_ins = [result.contiguous() for result in results]
    yield stand_ins
    for result, stand_in in zip(results, stand_ins, strict=True):
        if stand_in is not result:
            result.copy_(stand_in)


def _operands(
    block: EdgeBlock,
    op: Op,
    lhs: Tensor,
    lhs_target: Target,
    rhs: Tensor | None,
    rhs_target: Target,
    out: Tensor,
    out_target: Target,
) -> tuple[Operand, Operand | None]:
    left, right = Operand.of(lhs, lhs_target), None if rhs is None else Operand.of(rhs, rhs_target)
    shape = message_shape(op, left.shape, None if right is None else right.shape)
    for given in (left, right, Operand(out, out_target, shape)):
        _check_fits(block, given)
    return left, right


def _check_fits(block: EdgeBlock, operand: Operand | None) -> None:
    """Assert the shape of an operand, since compiled loops do not check bounds."""
    if operand is not None and operand.values is not None:
        rows = block.edge_bound if operand.target is Target.E else (block.num_src, block.num_dst)[operand.target]
        found = tuple(operand.values.shape)
        expected = (rows, *operand.shape)
        assert found[:1] >= expected[:1] and found[1:] == expected[1:], f"shape {found}, expected at least {expected}"  # noqa: PT018


def _choose(*tensors: Tensor | None) -> ModuleType:
    """The implementation that serves operands and results `tensors`."""
    given = [tensor for tensor in tensors if tensor is not None]
    if given[0].device.type == "meta":
        return meta
    dtype = given[0].dtype
    fit = dtype in (torch.float32, torch.float64) and all(
        tensor.dtype is dtype and tensor.device.type == "cpu" and tensor.numel() for tensor in given
    )
    return numba_kernels() or aggregate if fit else aggregate
