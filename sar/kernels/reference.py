"""Every kernel in plain torch, a chunk of edges at a time: the oracle of the fast kernels and the fallback for them.

Arithmetic is done in the type of the output, in float32 where that is a half precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sar.kernels.edge_block import EdgeBlock
from sar.kernels.ops import Op, Shape, Target, aligned_shapes

CHUNK_ELEMENTS = 4 * 2**20  # message elements that exist at a time

Edges = tuple[Tensor, Tensor, Tensor]  # source, destination and edge rows of a chunk: `edges[target]`


def aggregate_sum(
    block: EdgeBlock, op: Op, lhs: Tensor, lhs_target: Target, rhs: Tensor | None, rhs_target: Target, out: Tensor
) -> None:
    """Reference of `sar.kernels.aggregate_sum`."""
    for edges, message in _messages(block, op, lhs, lhs_target, rhs, rhs_target, out):
        out.index_add_(0, edges[Target.V], message)


def aggregate_cmp(
    block: EdgeBlock,
    op: Op,
    lhs: Tensor,
    lhs_target: Target,
    rhs: Tensor | None,
    rhs_target: Target,
    out: Tensor,
    arg: Tensor,
    largest: bool,
) -> None:
    """Reference of `sar.kernels.aggregate_cmp`."""
    reduce = "amax" if largest else "amin"
    limits = torch.finfo(out.dtype) if out.is_floating_point() else torch.iinfo(out.dtype)
    worst = limits.min if largest else limits.max
    if out.is_floating_point():
        worst *= torch.inf
    for edges, message in _messages(block, op, lhs, lhs_target, rhs, rhs_target, out):
        ids = edges[Target.E].to(arg.dtype)
        rows, segment = torch.unique_consecutive(edges[Target.V], return_inverse=True)
        shape = (rows.numel(), *out.shape[1:])
        index = segment.view(-1, *[1] * (out.dim() - 1)).expand_as(message)
        valid = ~message.isnan()
        best = out.new_full(shape, worst).scatter_reduce_(0, index, message.where(valid, worst), reduce)
        wins = valid & (message == best[segment])
        winners = ids.view(-1, *[1] * (out.dim() - 1)).where(wins, -1)
        best_arg = arg.new_full(shape, -1).scatter_reduce_(0, index, winners, "amax")
        old, old_arg = out[rows], arg[rows]
        better = ((best > old) if largest else (best < old)) | ((best == old) & (best_arg > old_arg))
        out[rows] = best.where(better, old)
        arg[rows] = best_arg.where(better, old_arg)


def edge_apply(
    block: EdgeBlock, op: Op, lhs: Tensor, lhs_target: Target, rhs: Tensor | None, rhs_target: Target, out: Tensor
) -> None:
    """Reference of `sar.kernels.edge_apply`."""
    for edges, message in _messages(block, op, lhs, lhs_target, rhs, rhs_target, out):
        out[edges[Target.E]] = message


def aggregate_grad(
    block: EdgeBlock,
    op: Op,
    wrt: str,
    lhs: Tensor | None,
    lhs_target: Target,
    lhs_shape: Shape,
    rhs: Tensor | None,
    rhs_target: Target,
    rhs_shape: Shape | None,
    grad: Tensor,
    grad_target: Target,
    arg: Tensor | None,
    out: Tensor,
) -> None:
    """Reference of `sar.kernels.aggregate_grad`."""
    dtype = _compute_dtype(out)
    lhs_aligned, rhs_aligned, full = aligned_shapes(op, lhs_shape, rhs_shape)
    grad_aligned = full[:-1] + (1,) if op is Op.DOT else full
    out_aligned, out_target = (lhs_aligned, lhs_target) if wrt == "lhs" else (rhs_aligned, rhs_target)
    for edges in _chunks(block, full):
        g = _gather(grad, edges[grad_target], grad_aligned, dtype)
        x = None if lhs is None else _gather(lhs, edges[lhs_target], lhs_aligned, dtype)
        y = None if rhs is None else _gather(rhs, edges[rhs_target], rhs_aligned, dtype)
        term = _derivative(op, wrt, x, y, g)
        if arg is not None:
            ids = edges[Target.E].view(-1, *[1] * len(full))
            term = term.where(_gather(arg, edges[Target.V], grad_aligned, arg.dtype) == ids, 0)
        term = term.sum_to_size(term.shape[:1] + out_aligned)
        out.index_add_(0, edges[out_target], term.reshape(term.shape[:1] + out.shape[1:]).to(out.dtype))


def edge_softmax_forward(blocks: Sequence[EdgeBlock], logits: Tensor) -> Tensor:
    """Reference of `sar.kernels.edge_softmax_forward`."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    rows = (max((block.num_dst for block in blocks), default=0), *logits.shape[1:])
    peak = torch.full(rows, -torch.inf, dtype=dtype, device=logits.device)
    total = torch.zeros(rows, dtype=dtype, device=logits.device)
    out = torch.zeros(logits.shape, dtype=dtype, device=logits.device)
    for edges in _all_chunks(blocks, logits.shape[1:]):
        _, dst, ids = edges
        index = dst.view(-1, *[1] * (logits.dim() - 1)).expand(-1, *logits.shape[1:])
        peak.scatter_reduce_(0, index, logits[ids].to(dtype), "amax")
    for edges in _all_chunks(blocks, logits.shape[1:]):
        _, dst, ids = edges
        weight = (logits[ids].to(dtype) - peak[dst]).exp()
        out[ids] = weight
        total.index_add_(0, dst, weight)
    for edges in _all_chunks(blocks, logits.shape[1:]):
        _, dst, ids = edges
        out[ids] /= total[dst]
    return out.to(logits.dtype)


def edge_softmax_backward(blocks: Sequence[EdgeBlock], out: Tensor, grad: Tensor) -> Tensor:
    """Reference of `sar.kernels.edge_softmax_backward`."""
    dtype = torch.promote_types(out.dtype, torch.float32)
    rows = (max((block.num_dst for block in blocks), default=0), *out.shape[1:])
    total = torch.zeros(rows, dtype=dtype, device=out.device)
    grad_logits = torch.zeros_like(out)
    for edges in _all_chunks(blocks, out.shape[1:]):
        _, dst, ids = edges
        total.index_add_(0, dst, out[ids].to(dtype) * grad[ids].to(dtype))
    for edges in _all_chunks(blocks, out.shape[1:]):
        _, dst, ids = edges
        grad_logits[ids] = (out[ids].to(dtype) * (grad[ids].to(dtype) - total[dst])).to(out.dtype)
    return grad_logits


def _compute_dtype(out: Tensor) -> torch.dtype:
    return torch.promote_types(out.dtype, torch.float32) if out.is_floating_point() else out.dtype


def _chunks(block: EdgeBlock, full: Shape) -> Iterator[Edges]:
    step = max(1, CHUNK_ELEMENTS // max(1, torch.Size(full).numel()))
    for begin in range(0, block.num_edges, step):
        end = min(begin + step, block.num_edges)
        yield block.cols[begin:end].long(), block.destinations(begin, end), block.ids(begin, end)


def _all_chunks(blocks: Sequence[EdgeBlock], full: Shape) -> Iterator[Edges]:
    for block in blocks:
        yield from _chunks(block, full)


def _gather(operand: Tensor, rows: Tensor, aligned: Shape, dtype: torch.dtype) -> Tensor:
    return operand.index_select(0, rows).to(dtype).view(rows.numel(), *aligned)


def _messages(
    block: EdgeBlock, op: Op, lhs: Tensor, lhs_target: Target, rhs: Tensor | None, rhs_target: Target, out: Tensor
) -> Iterator[tuple[Edges, Tensor]]:
    """The messages of the block, (chunk, *trailing shape of out), with the rows of their edges."""
    dtype = _compute_dtype(out)
    rhs_shape = None if rhs is None else tuple(rhs.shape[1:])
    lhs_aligned, rhs_aligned, full = aligned_shapes(op, tuple(lhs.shape[1:]), rhs_shape)
    for edges in _chunks(block, full):
        x = _gather(lhs, edges[lhs_target], lhs_aligned, dtype)
        y = None if rhs is None else _gather(rhs, edges[rhs_target], rhs_aligned, dtype)
        yield edges, _combine(op, x, y).reshape(edges[0].shape + out.shape[1:]).to(out.dtype)


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
