"""Aggregations in plain torch, a chunk of edges at a time.

Arithmetic is done in the type of the output, in float32 where that is a half precision.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sar.kernels.edge_block import EdgeBlock
from sar.kernels.ops import EdgeMessage, EdgeOperand, Op, Shape, aligned_message_shape
from sar.kernels.torch.edge_chunks import EdgeChunk, edge_chunks


def aggregate_sum(block: EdgeBlock, message: EdgeMessage, out: Tensor) -> None:
    """Reference of `sar.kernels.aggregate_sum`."""
    for edges, values in _messages(block, message, out):
        out.index_add_(0, edges.dst, values)


def aggregate_cmp(block: EdgeBlock, message: EdgeMessage, out: Tensor, arg: Tensor, largest: bool) -> None:
    """Reference of `sar.kernels.aggregate_cmp`."""
    reduce, worst = "amax" if largest else "amin", _worst(out.dtype, largest)
    for edges, values in _messages(block, message, out):
        index = _like(edges.dst, values).expand_as(values)
        valid, before = ~values.isnan(), out[edges.dst]
        out.scatter_reduce_(0, index, values.where(valid, worst), reduce)
        best = out[edges.dst]
        arg.scatter_(0, index, arg[edges.dst].where(best == before, -1))  # the same for all edges of a destination
        winners = _like(edges.ids, values).where(valid & (values == best), -1)
        arg.scatter_reduce_(0, index, winners.to(arg.dtype), "amax")


def add_rows(rows: Tensor, values: Tensor, out: Tensor) -> None:
    """Reference of `sar.kernels.add_rows`."""
    rows = rows.long()  # distinct, so a plain read-add-write is right
    out.index_copy_(0, rows, out.index_select(0, rows).add_(values))


def edge_apply(block: EdgeBlock, message: EdgeMessage, out: Tensor) -> None:
    """Reference of `sar.kernels.edge_apply`."""
    for edges, values in _messages(block, message, out):
        out[edges.ids] = values


def aggregate_grad(
    block: EdgeBlock, message: EdgeMessage, wrt: str, grad: EdgeOperand, out: Tensor, arg: Tensor | None
) -> None:
    """Reference of `sar.kernels.aggregate_grad`."""
    dtype = _compute_dtype(out)
    lhs_aligned, rhs_aligned, full = message.aligned_shapes()
    grad_aligned = aligned_message_shape(message.op, full)
    operand, aligned = message.operand(wrt), rhs_aligned if wrt == "rhs" else lhs_aligned
    for edges in edge_chunks(block, full):
        x = _gather(message.lhs, edges, lhs_aligned, dtype)
        y = _gather(message.rhs, edges, rhs_aligned, dtype)
        g = _gather(grad, edges, grad_aligned, dtype)
        assert g is not None
        term = _derivative(message.op, wrt, x, y, g)
        if arg is not None:
            best = arg[edges.dst].view(g.shape)
            term = term.where(best == _like(edges.ids, best), 0)
        term = term.sum_to_size(term.shape[:1] + aligned).reshape(term.shape[:1] + operand.shape)
        out.index_add_(0, edges.rows(operand.target), term.to(out.dtype))


def _compute_dtype(out: Tensor) -> torch.dtype:
    return torch.promote_types(out.dtype, torch.float32) if out.is_floating_point() else out.dtype


def _worst(dtype: torch.dtype, largest: bool) -> float | int:
    if dtype.is_floating_point:
        return -torch.inf if largest else torch.inf
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def _like(rows: Tensor, elements: Tensor) -> Tensor:
    """(E,) rows with as many dimensions as (E, *) elements."""
    return rows.view(-1, *[1] * (elements.dim() - 1))


def _gather(operand: EdgeOperand | None, edges: EdgeChunk, aligned: Shape, dtype: torch.dtype) -> Tensor | None:
    if operand is None or operand.values is None:
        return None
    rows = edges.rows(operand.target)
    return operand.values.index_select(0, rows).to(dtype).view(rows.numel(), *aligned)


def _messages(block: EdgeBlock, message: EdgeMessage, out: Tensor) -> Iterator[tuple[EdgeChunk, Tensor]]:
    """The messages of the block, (chunk, *trailing shape of out), a chunk of edges at a time."""
    dtype = _compute_dtype(out)
    lhs_aligned, rhs_aligned, full = message.aligned_shapes()
    for edges in edge_chunks(block, full):
        x = _gather(message.lhs, edges, lhs_aligned, dtype)
        y = _gather(message.rhs, edges, rhs_aligned, dtype)
        assert x is not None
        yield edges, _combine(message.op, x, y).reshape(edges.src.shape + out.shape[1:]).to(out.dtype)


def _combine(op: Op, x: Tensor, y: Tensor | None) -> Tensor:
    if op is Op.COPY:
        return x
    assert y is not None
    if op is Op.ADD:
        return x + y
    if op is Op.SUB:
        return x - y
    if op is Op.DIV:
        return x / y
    return (x * y).sum(-1, keepdim=True) if op is Op.DOT else x * y


def _derivative(op: Op, wrt: str, x: Tensor | None, y: Tensor | None, g: Tensor) -> Tensor:
    """d(message)/d(wrt) times g, in the product space of the operands."""
    if op in (Op.MUL, Op.DOT):
        other = y if wrt == "lhs" else x
        assert other is not None
        return g * other
    if op is Op.DIV:
        assert y is not None
        if wrt == "lhs":
            return g / y
        assert x is not None
        return -g * x / (y * y)
    return -g if op is Op.SUB and wrt == "rhs" else g
