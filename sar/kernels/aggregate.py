"""Aggregation over the edges of a block.

Checks the operands, because compiled loops do not check bounds, and calls their backend. Results, to which kernels
write, are contiguous.
"""

from __future__ import annotations

from torch import Tensor

from sar.errors import GraphError
from sar.kernels.backend import choose
from sar.kernels.edge_block import EdgeBlock
from sar.kernels.ops import EdgeMessage, EdgeOperand, Shape, Target

_ROWS = {Target.U: "sources", Target.V: "destinations", Target.E: "edges"}


def aggregate_sum(block: EdgeBlock, message: EdgeMessage, out: Tensor, *, fresh: bool = False) -> None:
    """Add to each destination row of `out` the messages of its edges in the block.

    Args:
        out: (num_dst, *message shape), float32 if operands have a half precision.
        fresh: `out` has no values yet, and counts as zeros. This saves a pass over its memory.
    """
    _check(block, message, out, Target.V)
    if block.num_edges:
        choose(out, *message.tensors).aggregate_sum(block, message, out, fresh)
    elif fresh:
        out.zero_()


def aggregate_cmp(block: EdgeBlock, message: EdgeMessage, out: Tensor, arg: Tensor, largest: bool) -> None:
    """Update the running maximum (minimum) of each destination with the messages of its edges in the block.

    Of equal messages that with the greatest edge ID wins, in whatever order blocks come. NaN never wins.

    Args:
        out: (num_dst, *message shape), -inf (+inf) at first, float32 if operands have a half precision.
        arg: like `out`, int32 or int64, -1 at first: the edge ID of the extreme.
        largest: maximum rather than minimum.
    """
    _check(block, message, out, Target.V)
    _check_shape(arg, tuple(out.shape), "The tensor of edge IDs of extremes")
    if not arg.is_contiguous():
        raise _not_contiguous(arg)
    if block.num_edges:
        choose(out, *message.tensors).aggregate_cmp(block, message, out, arg, largest)


def edge_apply(block: EdgeBlock, message: EdgeMessage, out: Tensor) -> None:
    """Write the message of every edge of the block to its row of `out`, (edges, *message shape)."""
    _check(block, message, out, Target.E)
    if block.num_edges:
        choose(out, *message.tensors).edge_apply(block, message, out)


def aggregate_grad(
    block: EdgeBlock, message: EdgeMessage, wrt: str, grad: EdgeOperand, out: Tensor, *, arg: Tensor | None = None,
    fresh: bool = False,
) -> None:  # fmt: skip
    """Add to `out` the gradient of the messages' operand `wrt`, summed over the dimensions that it broadcasts.

    Args:
        message: as in the forward; values may be None if `operand_values_needed` says so.
        wrt: "lhs" or "rhs".
        grad: gradient of the messages, with rows of edges, or of their aggregation, with rows of destinations.
        out: (rows of the operand's target, *trailing shape of the operand), float32 if that has a half precision.
        arg: edge IDs of a maximum or minimum, like `grad`; only their elements contribute. None: all do.
        fresh: as in `aggregate_sum`.
    """
    operand = message.operand(wrt)
    if grad.shape != message.shape or grad.target is Target.U or (arg is not None and grad.target is Target.E):
        raise GraphError(
            f"A gradient has rows of {_ROWS[grad.target]} and trailing shape {grad.shape}; expected {message.shape}, "
            "and rows of edges or destinations, of destinations for a maximum or minimum."
        )
    if arg is not None and grad.values is not None:
        _check_shape(arg, tuple(grad.values.shape), "The tensor of edge IDs of extremes")
    _check(block, message, out, operand.target, operand.shape, grad)
    if block.num_edges:
        choose(out, grad.values, *message.tensors).aggregate_grad(block, message, wrt, grad, out, arg, fresh)
    elif fresh:
        out.zero_()


def add_rows(rows: Tensor, values: Tensor, out: Tensor) -> None:
    """Add (n, ...) values to `rows`, (n,) integer and all distinct, of `out`, in place."""
    _check_shape(values, (len(rows), *out.shape[1:]), "A tensor of rows to add")
    if not out.is_contiguous():
        raise _not_contiguous(out)
    if values.numel():
        choose(out, values).add_rows(rows, values, out)


def _check(
    block: EdgeBlock, message: EdgeMessage, out: Tensor, out_target: Target, out_shape: Shape | None = None,
    grad: EdgeOperand | None = None,
) -> None:  # fmt: skip
    """Raise if an operand has too few rows or another width, since compiled loops do not check bounds."""
    if not out.is_contiguous():
        raise _not_contiguous(out)
    result = out, out_target, message.shape if out_shape is None else out_shape
    for values, target, shape in (*message.operands, result) if grad is None else (*message.operands, result, grad):
        if values is None:
            continue
        rows = block.edge_bound if target is Target.E else block.num_src if target is Target.U else block.num_dst
        if values.size(0) < rows or values.shape[1:] != shape:
            raise GraphError(
                f"A tensor with rows of {_ROWS[target]} has shape {tuple(values.shape)}; expected {(rows, *shape)}, "
                "or more rows."
            )


def _check_shape(values: Tensor, shape: Shape, what: str) -> None:
    if tuple(values.shape) != shape:
        raise GraphError(f"{what} has shape {tuple(values.shape)}; expected {shape}.")


def _not_contiguous(result: Tensor) -> GraphError:
    return GraphError(f"A result has the strides {result.stride()}; expected a contiguous tensor, as a new one is.")
