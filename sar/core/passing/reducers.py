"""Reducers: each combines the messages of one block of edges after the other, without tensors of edge size.

To add one, write a class here, and a line in `REDUCERS`. This file also gathers rows of nodes for the edges of a block.

[Note: softmax in a message]
The softmax of scores over a node's in-edges is known only after the last tile. But if messages are proportional to it,
their sum is S / T: T is the sum of the exponentials, and S the sum of messages that use exponentials instead of the
softmax. So a message function asks for exponentials (`EdgeBatch.exponentials`) and returns the terms of both sums,
which are reduced in the same way. In the forward, exponentials are relative to the greatest score of the destination so
far (`sar.kernels.OnlineSoftmax`), and a tile that raises it scales the sums down. In the backward the greatest score is
known, and it is a constant, because it cancels in S / T.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
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

PEAKS = "peaks"
"""Name of the result with the greatest scores."""
REAL_ONLY = "built-in arithmetic takes floating point. Call .float() or, on complex numbers, torch.view_as_real first."


class Reducer(ABC):
    """Reduces the messages of one call, block by block, and computes their gradients."""

    on_edges = False  # whether results have a row for each edge, in the visible order
    aggregate: Callable[[EdgeBlock, EdgeMessage], None]  # takes in the built-in messages of a block's edges

    def __init__(self, relation: Relation, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.relation = relation
        self.dtype = dtype  # of the messages; half precisions accumulate in float32
        self.shape = shape  # of a message
        rows, total_dtype = relation.num_dst, accumulation_dtype(dtype)
        if self.on_edges:
            rows, total_dtype = relation.num_edges, dtype
        self.total = torch.empty(rows, *shape, dtype=total_dtype, device=relation.in_degrees.device)

    @abstractmethod
    def add(self, block: EdgeBlock, messages: Tensor) -> None:
        """Take in messages of a block's edges, (E_block, *shape)."""

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """Return the result, and a tensor for `message_grad` if it reads one. The reducer keeps neither."""
        return vars(self).pop("total").to(self.dtype), None

    def total_grad(self, grad: Tensor) -> Tensor:
        """The gradient of `total`, from that of the result."""
        return grad.to(accumulation_dtype(self.dtype))

    @abstractmethod
    def message_grad(self, grad: Tensor, saved: Any, block: EdgeBlock, messages: Tensor) -> Tensor:
        """The gradient of a block's messages, (E_block, *shape), from that of `total` and what `finish` returned."""


class Collect(Reducer):
    """The messages of all edges."""

    on_edges = True

    def aggregate(self, block: EdgeBlock, message: EdgeMessage) -> None:
        edge_apply(block, message, self.total)

    def add(self, block: EdgeBlock, messages: Tensor) -> None:
        self.total.index_copy_(0, block.ids(0, block.num_edges), messages)

    def message_grad(self, grad: Tensor, saved: Any, block: EdgeBlock, messages: Tensor) -> Tensor:
        return grad.index_select(0, block.ids(0, block.num_edges)).to(self.dtype)


class Sum(Reducer):
    """Sums. The first block writes `total`, which saves a pass over its memory."""

    fresh = True  # whether `total` has no values yet

    def aggregate(self, block: EdgeBlock, message: EdgeMessage) -> None:
        aggregate_sum(block, message, self.total, fresh=self.fresh)
        self.fresh = False

    def add(self, block: EdgeBlock, messages: Tensor) -> None:
        self.aggregate(block.renumbered, _copies(messages, Target.E))

    def message_grad(self, grad: Tensor, saved: Any, block: EdgeBlock, messages: Tensor) -> Tensor:
        message_grads = torch.zeros(block.num_edges, *self.shape, dtype=grad.dtype, device=grad.device)
        edge_apply(block.renumbered, _copies(grad, Target.V), message_grads)
        return message_grads.to(self.dtype)


class Mean(Sum):
    """Sums over in-degrees, at least 1."""

    def finish(self) -> tuple[Tensor, Tensor | None]:
        self.total.div_(self.relation.degrees(self.total.dtype, self.total.dim()))
        return super().finish()

    def total_grad(self, grad: Tensor) -> Tensor:
        grad = super().total_grad(grad)
        return grad / self.relation.degrees(grad.dtype, grad.dim())


class Extreme(Reducer):
    """Maxima or minima. Of equal messages that with the greatest edge ID takes the gradient.

    With `fills`, infinite results become 0, such as those without messages. DGL does the same.
    """

    def __init__(
        self, relation: Relation, dtype: torch.dtype, shape: tuple[int, ...], *, largest: bool, fills: bool = True
    ) -> None:
        super().__init__(relation, dtype, shape)
        self.largest, self.fills = largest, fills
        self.total.fill_(-torch.inf if largest else torch.inf)
        self.edges = torch.full_like(self.total, -1, dtype=index_dtype(relation.num_edges))  # of the extremes

    def aggregate(self, block: EdgeBlock, message: EdgeMessage) -> None:
        aggregate_cmp(block, message, self.total, self.edges, self.largest)

    def add(self, block: EdgeBlock, messages: Tensor) -> None:
        best = torch.full_like(self.total, -torch.inf if self.largest else torch.inf)
        position = torch.full_like(self.edges, -1)
        copies = _copies(messages.to(best.dtype), Target.E)
        aggregate_cmp(block.renumbered, copies, best, position, self.largest)
        # The last entry is for position -1, which means that there is no message.
        ids = torch.cat([block.ids(0, block.num_edges), block.cols.new_full((1,), -1)])
        edges = ids[position.long()].to(position.dtype)
        better = (best > self.total) if self.largest else (best < self.total)
        better |= (best == self.total) & (edges > self.edges)
        torch.where(better, best, self.total, out=self.total)
        torch.where(better, edges, self.edges, out=self.edges)

    def finish(self) -> tuple[Tensor, Tensor | None]:
        edges = vars(self).pop("edges")
        if self.fills:
            infinite = self.total.isinf()
            self.total.masked_fill_(infinite, 0)
            edges.masked_fill_(infinite, -1)
        return super().finish()[0], edges

    def message_grad(self, grad: Tensor, saved: Any, block: EdgeBlock, messages: Tensor) -> Tensor:
        message_grads = torch.zeros(block.num_edges, *self.shape, dtype=grad.dtype, device=grad.device)
        positions = torch.full_like(saved, -1)  # in the block; -1 for edges of other blocks
        ids, order = block.ids(0, block.num_edges).sort()
        if len(ids):
            place = torch.searchsorted(ids, saved.long()).clamp(max=len(ids) - 1)
            positions = torch.where(ids[place] == saved, order[place], -1).to(saved.dtype)
        copies = EdgeMessage(Op.COPY, EdgeOperand(None, Target.E, self.shape))
        aggregate_grad(block.renumbered, copies, "lhs", EdgeOperand.of(grad, Target.V), message_grads, arg=positions)
        return message_grads.to(self.dtype)


class SharedExtreme(Reducer):
    """Maxima or minima with the gradient of `torch.scatter_reduce`, which equal messages share evenly.

    Infinities and NaN do not change, and nodes without messages get 0.
    """

    def __init__(self, relation: Relation, dtype: torch.dtype, shape: tuple[int, ...], *, how: str) -> None:
        super().__init__(relation, dtype, shape)
        self.how = how  # "amax" or "amin"
        self.total.fill_(torch.inf if how == "amin" else -torch.inf)
        self.ties = torch.zeros_like(self.total)  # number of messages that are equal to the total

    def add(self, block: EdgeBlock, messages: Tensor) -> None:
        rows, place = places(block, messages)
        messages = messages.to(self.total.dtype)
        before = self.total[rows]
        best = before.scatter_reduce(0, place, messages, self.how, include_self=True)
        count = torch.zeros_like(best).scatter_add_(0, place, (messages == best.gather(0, place)).to(best.dtype))
        self.ties[rows] = torch.where(best == before, self.ties[rows] + count, count)
        self.total[rows] = best

    def finish(self) -> tuple[Tensor, Tensor | None]:
        total, ties = vars(self).pop("total"), vars(self).pop("ties")
        # NaN equals no message, so the shares of its gradient are NaN, as in torch.
        total.masked_fill_((ties == 0) & ~total.isnan(), 0)
        # If the result is 0, torch also counts its initial 0 as a message, which gets no gradient.
        return total.to(self.dtype), torch.stack([total, ties + (total == 0)])

    def message_grad(self, grad: Tensor, saved: Any, block: EdgeBlock, messages: Tensor) -> Tensor:
        (total, ties), (rows, place) = saved, places(block, messages)
        share = grad[rows] / ties[rows]
        return (share.gather(0, place) * (messages == total[rows].gather(0, place))).to(self.dtype)


class Product(Reducer):
    """Products, 1 without messages."""

    def __init__(self, relation: Relation, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        super().__init__(relation, dtype, shape)
        self.total.fill_(1)  # the product of the messages that are not 0
        self.zeros = torch.zeros_like(self.total)  # number of messages that are

    def add(self, block: EdgeBlock, messages: Tensor) -> None:
        rows, place = places(block, messages)
        messages = messages.to(self.total.dtype)
        zero = messages == 0
        self.total[rows] = self.total[rows].scatter_reduce(0, place, messages.masked_fill(zero, 1), "prod")
        self.zeros[rows] = self.zeros[rows].scatter_add(0, place, zero.to(messages.dtype))

    def finish(self) -> tuple[Tensor, Tensor | None]:
        total, zeros = vars(self).pop("total"), vars(self).pop("zeros")
        return total.masked_fill(zeros > 0, 0).to(self.dtype), torch.stack([total, zeros])

    def message_grad(self, grad: Tensor, saved: Any, block: EdgeBlock, messages: Tensor) -> Tensor:
        (total, zeros), (rows, place) = saved, places(block, messages)
        others, zeros = (grad[rows] * total[rows]).gather(0, place), zeros[rows].gather(0, place)
        zero = messages == 0
        only_one = zero & (zeros == 1)
        return torch.where((zeros == 0) | only_one, others / messages.masked_fill(zero, 1), 0.0).to(self.dtype)


UNFILLED = "unfilled "
"""Prefix of "max" or "min" that keeps infinite results, such as those without messages."""
REDUCERS: dict[str | None, Callable[..., Reducer]] = {
    None: Collect,
    "sum": Sum,
    "mean": Mean,
    "max": partial(Extreme, largest=True),
    "min": partial(Extreme, largest=False),
    UNFILLED + "max": partial(Extreme, largest=True, fills=False),
    UNFILLED + "min": partial(Extreme, largest=False, fills=False),
    # Those of PyTorch Geometric take Python messages only.
    "amax": partial(SharedExtreme, how="amax"),
    "amin": partial(SharedExtreme, how="amin"),
    "prod": Product,
}
"""By the name in a call. Arguments are the relation, and the dtype and shape of a message."""


def _copies(values: Tensor, target: Target) -> EdgeMessage:
    return EdgeMessage(Op.COPY, EdgeOperand.of(values, target))


def places(block: EdgeBlock, like: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that have messages, (R,), and each message's index among them, in the shape of the messages."""
    place = torch.repeat_interleave(block.indptr.long().diff())
    return block.rows.long(), place.view(-1, *[1] * (like.dim() - 1)).expand_as(like)


def gather_rows(column: Tensor, block: EdgeBlock, target: Target) -> Tensor:
    """The row of each edge's source (`Target.U`) or destination (`Target.V`), (E_block, ...)."""
    rows = block.cols if target is Target.U else block.destinations(0, block.num_edges)
    return _Gather.apply(column, rows, block, target) if column.is_floating_point() else column.index_select(0, rows)


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


def edge_rows(column: Tensor, block: EdgeBlock) -> Tensor:
    """The rows of a block's edges, (E_block, ...), in an (E, ...) column; a view if they are contiguous."""
    if block.edge_ids is None:
        return column[block.edge_offset : block.edge_offset + block.num_edges]
    return column.index_select(0, block.edge_ids)


def by_head(rows: Tensor, heads: int | None = None) -> Tensor:
    """Reshape (N, ...) rows to (N, heads, elements of a head), or to (N, elements) if `heads` is None."""
    size = prod(rows.shape[1:])
    return rows.reshape(len(rows), size) if heads is None else rows.reshape(len(rows), heads, size // heads)
