"""Rows of nodes to edges, and messages of edges to nodes, without saving anything of edge size."""

from dataclasses import dataclass
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


def edge_rows(column: Tensor, block: EdgeBlock) -> Tensor:
    """The rows of a block's edges, (E_block, ...), of an (E, ...) column; a view where they lie together."""
    if block.edge_ids is None:
        return column[block.edge_offset : block.edge_offset + block.num_edges]
    return column.index_select(0, block.edge_ids)


def add_to_edges(column: Tensor, block: EdgeBlock, values: Tensor) -> None:
    """Add (E_block, ...) values to the rows of a block's edges, in place."""
    if block.edge_ids is None:
        column[block.edge_offset : block.edge_offset + block.num_edges] += values
    else:
        column.index_add_(0, block.edge_ids, values.to(column.dtype))


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
        copies = EdgeMessage(Op.COPY, EdgeOperand(None, ctx.target, tuple(ctx.shape[1:])))
        aggregate_grad(ctx.block.renumbered, copies, "lhs", EdgeOperand.of(grad.to(dtype), Target.E), out)
        return out.to(grad.dtype), None, None


@dataclass
class Combined:
    """The messages so far: their reduction, and of maxima and minima the edges that they come from, -1 for none."""

    total: Tensor
    argmax: Tensor | None


class Reduction:
    """Takes the messages of one block after the other into one result, and gives each its gradient back.

    Args:
        relation: whose edges send.
        reducer: sum, mean, max or min at the destinations; None to collect the messages in the visible edge order.
        dtype: of the messages; half precisions accumulate in float32.
        shape: of a message.
    """

    def __init__(self, relation: Relation, reducer: str | None, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.relation = relation
        self.reducer = reducer
        self.dtype = dtype
        self.shape = shape

    def start(self) -> Combined:
        """The result without any message."""
        relation, device = self.relation, self.relation.in_degrees.device
        if self.reducer is None:
            return Combined(torch.empty(relation.num_edges, *self.shape, dtype=self.dtype, device=device), None)
        fill = {"max": -torch.inf, "min": torch.inf}.get(self.reducer, 0.0)
        shape, argmax = (relation.num_dst, *self.shape), None
        total = torch.full(shape, fill, dtype=accumulation_dtype(self.dtype), device=device)
        if self.reducer in ("max", "min"):
            argmax = torch.full(shape, -1, dtype=index_dtype(relation.num_edges), device=device)
        return Combined(total, argmax)

    def add(self, combined: Combined, message: Tensor, block: EdgeBlock) -> None:
        """Take in the messages of a block, (E_block, ...)."""
        if self.reducer is None:
            combined.total.index_copy_(0, block.ids(0, block.num_edges), message)
        elif combined.argmax is None:
            aggregate_sum(block.renumbered, _copies(message, Target.E), combined.total)
        else:
            self._take_better(message.to(combined.total.dtype), combined.total, combined.argmax, block)

    def _take_better(self, message: Tensor, total: Tensor, argmax: Tensor, block: EdgeBlock) -> None:
        """Update the extremes and their edges; of equal messages the greatest edge ID wins."""
        largest = self.reducer == "max"
        best = torch.full_like(total, -torch.inf if largest else torch.inf)
        position = torch.full_like(argmax, -1)
        aggregate_cmp(block.renumbered, _copies(message, Target.E), best, position, largest)
        ids = torch.cat([block.ids(0, block.num_edges), block.cols.new_full((1,), -1)])  # position -1: no message
        edges = ids[position.long()].to(position.dtype)
        better = (best > total) if largest else (best < total)
        better |= (best == total) & (edges > argmax)
        torch.where(better, best, total, out=total)
        torch.where(better, edges, argmax, out=argmax)

    def finish(self, combined: Combined) -> Tensor:
        """The result once all messages are in."""
        total = combined.total
        if self.reducer == "mean":
            degrees = self.relation.degrees_like(total)
            total = total.div_(degrees) if total.is_floating_point() else total / degrees
        elif combined.argmax is not None:
            # As DGL does, whether infinite for want of messages or by value.
            infinite = total.isinf()
            total.masked_fill_(infinite, 0)
            combined.argmax.masked_fill_(infinite, -1)
        return total.to(self.dtype)

    def total_grad(self, grad: Tensor) -> Tensor:
        """The gradient of `Combined.total`, from that of the result."""
        if self.reducer is None:
            return grad
        grad = grad.to(accumulation_dtype(self.dtype))
        return grad / self.relation.degrees_like(grad) if self.reducer == "mean" else grad

    def message_grad(self, grad: Tensor, argmax: Tensor | None, block: EdgeBlock, message: Tensor) -> Tensor:
        """The gradient of a block's messages, (E_block, ...), from that of the total."""
        if self.reducer is None:
            return grad.index_select(0, block.ids(0, block.num_edges))
        made = torch.zeros(block.num_edges, *self.shape, dtype=grad.dtype, device=grad.device)
        if argmax is None:
            edge_apply(block.renumbered, _copies(grad, Target.V), made)
        else:
            positions = _positions(argmax, block)
            copies = EdgeMessage(Op.COPY, EdgeOperand(None, Target.E, self.shape))
            aggregate_grad(block.renumbered, copies, "lhs", EdgeOperand.of(grad, Target.V), made, arg=positions)
        return made.to(self.dtype)


def _copies(values: Tensor, target: Target) -> EdgeMessage:
    return EdgeMessage(Op.COPY, EdgeOperand.of(values, target))


def _positions(argmax: Tensor, block: EdgeBlock) -> Tensor:
    """Edge IDs as positions in the block, -1 for edges of other blocks."""
    ids = block.ids(0, block.num_edges)
    if not len(ids):
        return torch.full_like(argmax, -1)
    ids, order = ids.sort()
    place = torch.searchsorted(ids, argmax.long()).clamp(max=len(ids) - 1)
    return torch.where(ids[place] == argmax, order[place], -1).to(argmax.dtype)
