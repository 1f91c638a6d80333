"""Rows of nodes to edges, and messages of edges to nodes, as autograd functions that save nothing of edge size."""

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
    if not column.is_floating_point():
        return column.index_select(0, _node_rows(block, target))
    gathered: Tensor = _Gather.apply(column, block, target)
    return gathered


def _node_rows(block: EdgeBlock, target: Target) -> Tensor:
    return block.cols if target is Target.U else block.destinations(0, block.num_edges)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, column: Tensor, block: EdgeBlock, target: Target) -> Tensor:
        ctx.shape, ctx.block, ctx.target = column.shape, block, target
        return column.index_select(0, _node_rows(block, target))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        dtype = accumulation_dtype(grad.dtype)
        out = torch.zeros(ctx.shape, dtype=dtype, device=grad.device)
        copy = EdgeMessage(Op.COPY, EdgeOperand(None, ctx.target, tuple(ctx.shape[1:])))
        aggregate_grad(ctx.block.renumbered, copy, "lhs", EdgeOperand.of(grad.to(dtype), Target.E), out)
        return out.to(grad.dtype), None, None


class Combine:
    """Takes the messages of one block after the other into one result.

    Args:
        relation: whose edges send.
        reducer: sum, mean, max or min at the destinations; None to collect the messages in the visible edge order.
        sample: a message, for dtype and trailing shape.
    """

    def __init__(self, relation: Relation, reducer: str | None, sample: Tensor) -> None:
        self.relation = relation
        self.reducer = reducer
        self.dtype = sample.dtype
        self.shape = tuple(sample.shape[1:])
        self.winners: Tensor | None = None  # edge IDs of maxima or minima so far

    def start(self, device: torch.device) -> Tensor:
        """The result without any message."""
        if self.reducer is None:
            return torch.empty(self.relation.num_edges, *self.shape, dtype=self.dtype, device=device)
        fill = {"max": -torch.inf, "min": torch.inf}.get(self.reducer, 0.0)
        shape = (self.relation.num_dst, *self.shape)
        total = torch.full(shape, fill, dtype=accumulation_dtype(self.dtype), device=device)
        if self.reducer in ("max", "min"):
            self.winners = torch.full(total.shape, -1, dtype=index_dtype(self.relation.num_edges), device=device)
        return total

    def add(self, total: Tensor, message: Tensor, block: EdgeBlock) -> Tensor:
        """The result with the messages of a block, (E_block, ...), in place."""
        combined: Tensor = _Combine.apply(total, message, block, self)
        return combined

    def finish(self, total: Tensor) -> Tensor:
        """The result once all messages are in."""
        if self.reducer == "mean":
            total = total / self.relation.degrees_like(total)
        elif self.winners is not None:
            total = total.masked_fill(total.isinf(), 0)
        return total.to(self.dtype)


class _Combine(torch.autograd.Function):
    """Saves nothing but, once for all blocks, the winners."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, message: Tensor, block: EdgeBlock, combine: Combine) -> Tensor:
        ctx.block, ctx.combine, ctx.dtype = block, combine, message.dtype
        ctx.mark_dirty(total)
        here = block.renumbered
        if combine.reducer is None:
            total.index_copy_(0, block.ids(0, block.num_edges), message)
        elif combine.winners is None:
            aggregate_sum(here, EdgeMessage(Op.COPY, EdgeOperand.of(message, Target.E)), total)
        else:
            _keep_best(total, message.to(total.dtype), block, combine)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        block, combine = ctx.block, ctx.combine
        if combine.reducer is None:
            return grad, grad.index_select(0, block.ids(0, block.num_edges)), None, None
        message_grad = torch.zeros(block.num_edges, *combine.shape, dtype=grad.dtype, device=grad.device)
        if combine.winners is None:
            edge_apply(block.renumbered, EdgeMessage(Op.COPY, EdgeOperand.of(grad, Target.V)), message_grad)
        else:
            winners = _positions(combine.winners, block)
            copy = EdgeMessage(Op.COPY, EdgeOperand(None, Target.E, combine.shape))
            total_grad = EdgeOperand.of(grad, Target.V)
            aggregate_grad(block.renumbered, copy, "lhs", total_grad, message_grad, arg=winners)
        return grad, message_grad.to(ctx.dtype), None, None


def _keep_best(total: Tensor, message: Tensor, block: EdgeBlock, combine: Combine) -> None:
    """Update the extremes and their winners; of equal messages the greatest edge ID wins."""
    assert combine.winners is not None
    largest = combine.reducer == "max"
    best = torch.full_like(total, -torch.inf if largest else torch.inf)
    position = torch.full_like(combine.winners, -1)
    copy = EdgeMessage(Op.COPY, EdgeOperand.of(message, Target.E))
    aggregate_cmp(block.renumbered, copy, best, position, largest)
    ids = torch.cat([block.ids(0, block.num_edges), block.cols.new_full((1,), -1)])  # position -1: no message
    winner = ids[position.long()].to(position.dtype)
    better = ((best > total) if largest else (best < total)) | ((best == total) & (winner > combine.winners))
    torch.where(better, best, total, out=total)
    torch.where(better, winner, combine.winners, out=combine.winners)


def _positions(winners: Tensor, block: EdgeBlock) -> Tensor:
    """Edge IDs as positions in the block, -1 for edges of other blocks."""
    ids = block.ids(0, block.num_edges)
    if not len(ids):
        return torch.full_like(winners, -1)
    ids, order = ids.sort()
    place = torch.searchsorted(ids, winners.long()).clamp(max=len(ids) - 1)
    return torch.where(ids[place] == winners, order[place], -1).to(winners.dtype)
