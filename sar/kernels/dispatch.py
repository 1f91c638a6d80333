"""The kernel interface: checks what is handed in and picks the Numba kernels or the torch reference."""

from __future__ import annotations

from torch import Tensor

from sar.kernels import backend
from sar.kernels.edge_block import EdgeBlock
from sar.kernels.ops import Op, Shape, Target, message_shape


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
        op: an operator, `rhs` is None for copy.
        lhs, rhs: (rows of their target, *trailing shape).
        lhs_target, rhs_target: whose rows the operands have.
        out: (num_dst, *message shape), float32 when operands have a half precision.
    """
    op = Op(op)
    _check_operands(block, op, lhs, lhs_target, rhs, rhs_target, out, block.num_dst)
    _backend(out, lhs, rhs).aggregate_sum(block, op, lhs, lhs_target, rhs, rhs_target, out)


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

    Of equal messages the one with the greatest edge ID wins, in whatever order blocks come. NaN never wins.

    Args:
        block, op, lhs, lhs_target, rhs, rhs_target: as in `aggregate_sum`.
        out: (num_dst, *message shape), -inf (+inf) at first.
        arg: like `out`, int32 or int64, -1 at first; the edge ID of the winner.
        largest: maximum rather than minimum.
    """
    op = Op(op)
    _check_operands(block, op, lhs, lhs_target, rhs, rhs_target, out, block.num_dst)
    assert arg.shape == out.shape
    _backend(out, lhs, rhs).aggregate_cmp(block, op, lhs, lhs_target, rhs, rhs_target, out, arg, largest)


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
    _check_operands(block, op, lhs, lhs_target, rhs, rhs_target, out, block.edge_bound)
    _backend(out, lhs, rhs).edge_apply(block, op, lhs, lhs_target, rhs, rhs_target, out)


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
        block, op, lhs_target, rhs_target: as in the forward.
        wrt: "lhs" or "rhs".
        lhs, rhs: the operands; None where `operand_values_needed` says so.
        grad: gradient of the messages, (edges, *message shape), or of their aggregation, (num_dst, *message shape).
        grad_target: E or V, accordingly.
        arg: winners of a maximum or minimum; only their elements contribute. None otherwise.
        out: (rows of the operand's target, *trailing shape of the operand).
        lhs_shape, rhs_shape: trailing shapes of the operands.
    """
    op = Op(op)
    target, shape = (lhs_target, lhs_shape) if wrt == "lhs" else (rhs_target, rhs_shape)
    lhs_shape, rhs_shape = tuple(lhs_shape), None if rhs_shape is None else tuple(rhs_shape)
    assert shape is not None and out.shape[1:] == tuple(shape) and out.shape[0] >= _rows(block, target)
    assert grad.shape[1:] == message_shape(op, lhs_shape, rhs_shape)
    assert grad_target is not Target.U and grad.shape[0] >= _rows(block, grad_target)
    assert arg is None or (grad_target is Target.V and arg.shape == grad.shape)
    assert lhs is None or (lhs.shape[1:] == lhs_shape and lhs.shape[0] >= _rows(block, lhs_target))
    assert rhs is None or (rhs.shape[1:] == rhs_shape and rhs.shape[0] >= _rows(block, rhs_target))
    _backend(out, grad, lhs, rhs).aggregate_grad(
        block, op, wrt, lhs, lhs_target, lhs_shape, rhs, rhs_target, rhs_shape, grad, grad_target, arg, out
    )


def _rows(block: EdgeBlock, target: Target) -> int:
    return (block.num_src, block.num_dst, block.edge_bound)[target]


def _check_operands(
    block: EdgeBlock,
    op: Op,
    lhs: Tensor,
    lhs_target: Target,
    rhs: Tensor | None,
    rhs_target: Target,
    out: Tensor,
    out_rows: int,
) -> None:
    """The compiled kernels do not check bounds, so shapes that do not fit must not get that far."""
    shape = message_shape(op, tuple(lhs.shape[1:]), None if rhs is None else tuple(rhs.shape[1:]))
    assert out.shape[1:] == shape and out.shape[0] >= out_rows, (out.shape, shape, out_rows)
    assert lhs.shape[0] >= _rows(block, lhs_target), (lhs.shape, lhs_target)
    assert rhs is None or rhs.shape[0] >= _rows(block, rhs_target), (rhs.shape, rhs_target)
