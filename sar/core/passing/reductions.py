"""Gathers rows of nodes for the edges of a block, and reduces messages block by block, without tensors of edge size.

[Note: softmax in a message]
The softmax of scores over a node's in-edges is known only after the last tile. But if messages are proportional to it,
their sum is S / T: T is the sum of the exponentials, and S the sum of messages that use exponentials instead of the
softmax. So a message function asks for exponentials (`EdgeBatch.exponentials`) and returns the terms of both sums,
which are reduced in the same way. In the forward, exponentials are relative to the greatest score of the destination so
far (`sar.kernels.OnlineSoftmax`), and a tile that raises it scales the sums down. In the backward the greatest score is
known, and it is a constant, because it cancels in S / T.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sar.core.relation import Relation
from sar.kernels import (
    EdgeBlock,
    EdgeMessage,
    EdgeOperand,
    Op,
    Target,
    accumulation_dtype,
    aggregate_cmp,
    aggregate_grad,
    aggregate_sum,
    edge_apply,
    index_dtype,
)


def gather_rows(column: Tensor, block: EdgeBlock, target: Target) -> Tensor:
    """The row of each edge's source (`Target.U`) or destination (`Target.V`), (E_block, ...)."""
    rows = block.cols if target is Target.U else block.destinations(0, block.num_edges)
    return _Gather.apply(column, rows, block, target) if column.is_floating_point() else column.index_select(0, rows)


def edge_rows(column: Tensor, block: EdgeBlock) -> Tensor:
    """The rows of a block's edges, (E_block, ...), in an (E, ...) column; a view if they are contiguous."""
    if block.edge_ids is None:
        return column[block.edge_offset : block.edge_offset + block.num_edges]
    return column.index_select(0, block.edge_ids)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, column: Tensor, rows: Tensor, block: EdgeBlock, target: Target) -> Tensor:
        ctx.shape, ctx.block, ctx.target = column.shape, block, target
        return column.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        out = torch.zeros(ctx.shape, dtype=accumulation_dtype(grad.dtype), device=grad.device)
        copies = EdgeMessage(Op.COPY, EdgeOperand(None, ctx.target, tuple(ctx.shape[1:])))
        aggregate_grad(ctx.block.renumbered, copies, "lhs", EdgeOperand.of(grad, Target.E), out)
        return out.to(grad.dtype), None, None, None


UNFILLED = "unfilled "
"""Prefix of "max" or "min" that keeps infinite results, such as those without messages."""


@dataclass
class Combined:
    """Partial result of a reduction."""

    total: Tensor
    # Edges of the maxima or minima, -1 for none, or data for the backward of `TORCH_REDUCERS`; else None.
    argmax: Any


class Reduction:
    """Reduces the messages of one block after the other, and computes their gradients."""

    def __init__(self, relation: Relation, reducer: str | None, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.relation = relation
        # sum, mean, max or min; None to collect the messages in the visible edge order
        self.reducer = reducer and reducer.removeprefix(UNFILLED)
        self.fills = reducer == self.reducer
        self.dtype = dtype  # dtype of the messages; half precisions accumulate in float32
        self.shape = shape  # shape of a message

    def start(self, *, filled: bool = True) -> Combined:
        """The initial result, without messages. If not `filled`, sums and means have no values yet."""
        relation, device = self.relation, self.relation.in_degrees.device
        if self.reducer is None:
            return Combined(torch.empty(relation.num_edges, *self.shape, dtype=self.dtype, device=device), None)
        fill = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "min": torch.inf, "amin": torch.inf}.get(self.reducer, -torch.inf)
        shape, argmax = (relation.num_dst, *self.shape), None
        total = torch.empty(shape, dtype=accumulation_dtype(self.dtype), device=device)
        if filled or fill:
            total.fill_(fill)
        if self.reducer in ("max", "min"):
            argmax = torch.full(shape, -1, dtype=index_dtype(relation.num_edges), device=device)
        elif self.reducer in TORCH_REDUCERS:
            argmax = torch.zeros_like(total)
        return Combined(total, argmax)

    def add(self, combined: Combined, message: Tensor, block: EdgeBlock) -> None:
        """Add the messages of a block, (E_block, ...)."""
        if self.reducer is None:
            combined.total.index_copy_(0, block.ids(0, block.num_edges), message)
        elif combined.argmax is None:
            aggregate_sum(block.renumbered, _copies(message, Target.E), combined.total)
        else:
            # Update the extremes and their edges. If messages are equal, the greatest edge ID wins.
            total, argmax, largest = combined.total, combined.argmax, self.reducer == "max"
            best = torch.full_like(total, -torch.inf if largest else torch.inf)
            position = torch.full_like(argmax, -1)
            aggregate_cmp(block.renumbered, _copies(message.to(total.dtype), Target.E), best, position, largest)
            # The last entry is for position -1, which means that there is no message.
            ids = torch.cat([block.ids(0, block.num_edges), block.cols.new_full((1,), -1)])
            edges = ids[position.long()].to(position.dtype)
            better = (best > total) if largest else (best < total)
            better |= (best == total) & (edges > argmax)
            torch.where(better, best, total, out=total)
            torch.where(better, edges, argmax, out=argmax)

    def finish(self, combined: Combined) -> Tensor:
        """The final result, after all messages have been added."""
        total = combined.total
        if self.reducer == "mean":
            total.div_(self.relation.degrees(total.dtype, total.dim()))
        elif combined.argmax is not None and self.fills:
            # DGL does the same, whether there are no messages or a message is infinite.
            infinite = total.isinf()
            total.masked_fill_(infinite, 0)
            combined.argmax.masked_fill_(infinite, -1)
        return total.to(self.dtype)

    def total_grad(self, grad: Tensor) -> Tensor:
        """Compute the gradient of `Combined.total` from that of the result."""
        if self.reducer is None:
            return grad
        grad = grad.to(accumulation_dtype(self.dtype))
        return grad / self.relation.degrees(grad.dtype, grad.dim()) if self.reducer == "mean" else grad

    def message_grad(self, grad: Tensor, argmax: Tensor | None, block: EdgeBlock, message: Tensor) -> Tensor:
        """Compute the gradient of a block's messages, (E_block, ...), from that of the total."""
        if self.reducer is None:
            return grad.index_select(0, block.ids(0, block.num_edges))
        message_grads = torch.zeros(block.num_edges, *self.shape, dtype=grad.dtype, device=grad.device)
        if argmax is None:
            edge_apply(block.renumbered, _copies(grad, Target.V), message_grads)
        else:
            positions = torch.full_like(argmax, -1)  # in the block; -1 for edges of other blocks
            ids, order = block.ids(0, block.num_edges).sort()
            if len(ids):
                place = torch.searchsorted(ids, argmax.long()).clamp(max=len(ids) - 1)
                positions = torch.where(ids[place] == argmax, order[place], -1).to(argmax.dtype)
            copies = EdgeMessage(Op.COPY, EdgeOperand(None, Target.E, self.shape))
            aggregate_grad(
                block.renumbered, copies, "lhs", EdgeOperand.of(grad, Target.V), message_grads, arg=positions
            )
        return message_grads.to(self.dtype)


def _copies(values: Tensor, target: Target) -> EdgeMessage:
    return EdgeMessage(Op.COPY, EdgeOperand.of(values, target))


def places(block: EdgeBlock, like: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that have messages, (R,), and each message's index among them, in the shape of the messages."""
    place = torch.repeat_interleave(block.indptr.long().diff())
    return block.rows.long(), place.view(-1, *[1] * (like.dim() - 1)).expand_as(like)


class Extreme(Reduction):
    """Maxima or minima with the gradient of `torch.scatter_reduce`, which differs from DGL's.

    Messages equal to the result share the gradient evenly; `Combined.argmax` counts them. Infinities and NaN do not
    change, and nodes without messages get 0.
    """

    def add(self, combined: Combined, message: Tensor, block: EdgeBlock) -> None:
        rows, place = places(block, message)
        message = message.to(combined.total.dtype)
        before = combined.total[rows]
        best = before.scatter_reduce(0, place, message, self.reducer or "", include_self=True)
        count = torch.zeros_like(best).scatter_add_(0, place, (message == best.gather(0, place)).to(best.dtype))
        combined.argmax[rows] = torch.where(best == before, combined.argmax[rows] + count, count)
        combined.total[rows] = best

    def finish(self, combined: Combined) -> Tensor:
        # NaN equals no message, so the shares of its gradient are NaN, as in torch.
        total = combined.total.masked_fill_((combined.argmax == 0) & ~combined.total.isnan(), 0)
        # If the result is 0, torch counts its initial 0 as a message, too, though that gets no gradient.
        combined.argmax = torch.stack([total, combined.argmax + (total == 0)])
        return total.to(self.dtype)

    def message_grad(self, grad: Tensor, argmax: Any, block: EdgeBlock, message: Tensor) -> Tensor:
        rows, place = places(block, message)
        total, share = argmax[0, rows], grad[rows] / argmax[1, rows]
        return (share.gather(0, place) * (message == total.gather(0, place))).to(self.dtype)


class Product(Reduction):
    """Products, 1 without messages. `Combined.total` leaves out messages that are 0; `Combined.argmax` counts them."""

    def add(self, combined: Combined, message: Tensor, block: EdgeBlock) -> None:
        rows, place = places(block, message)
        message = message.to(combined.total.dtype)
        zero = message == 0
        combined.total[rows] = combined.total[rows].scatter_reduce(0, place, message.masked_fill(zero, 1), "prod")
        combined.argmax[rows] = combined.argmax[rows].scatter_add(0, place, zero.to(message.dtype))

    def finish(self, combined: Combined) -> Tensor:
        total, zeros = combined.total, combined.argmax
        combined.argmax = torch.stack([total, zeros])
        return total.masked_fill(zeros > 0, 0).to(self.dtype)

    def message_grad(self, grad: Tensor, argmax: Any, block: EdgeBlock, message: Tensor) -> Tensor:
        rows, place = places(block, message)
        others, zeros = (grad[rows] * argmax[0, rows]).gather(0, place), argmax[1, rows].gather(0, place)
        zero = message == 0
        only_one = zero & (zeros == 1)
        return torch.where((zeros == 0) | only_one, others / message.masked_fill(zero, 1), 0.0).to(self.dtype)


TORCH_REDUCERS: dict[str, type[Reduction]] = {"amax": Extreme, "amin": Extreme, "prod": Product}


PEAKS = "peaks"
"""Name of the result with the greatest scores."""


def by_head(rows: Tensor, heads: int | None = None) -> Tensor:
    """Reshape (N, ...) rows to (N, heads, elements of a head), or to (N, elements) if `heads` is None."""
    size = prod(rows.shape[1:])
    return rows.reshape(len(rows), size) if heads is None else rows.reshape(len(rows), heads, size // heads)
