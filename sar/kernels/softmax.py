"""Softmax over the in-edges of each destination, made of the other kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sar.kernels.dispatch import aggregate_cmp, aggregate_sum, edge_apply
from sar.kernels.edge_block import EdgeBlock, index_dtype
from sar.kernels.ops import EdgeMessage, EdgeOperand, Op, Target


def edge_softmax_forward(blocks: Sequence[EdgeBlock], logits: Tensor) -> Tensor:
    """exp(x_e) / sum of exp(x_i) over the edges i into the destination of e, computed from the greatest x_i.

    Args:
        blocks: blocks whose edge IDs are, together, 0 to E - 1; a destination's edges may lie in several.
        logits: (E, *).

    Returns:
        (E, *), NaN for destinations with a logit that is NaN or +inf or with all of them -inf.
    """
    logits, dtype = logits.to(torch.promote_types(logits.dtype, torch.float32)), logits.dtype
    shape = (max((block.num_dst for block in blocks), default=0), *logits.shape[1:])
    peak = logits.new_full(shape, -torch.inf)
    argmax = torch.full(shape, -1, dtype=index_dtype(logits.shape[0]), device=logits.device)
    for block in blocks:
        aggregate_cmp(block, EdgeMessage(Op.COPY, _of_edges(logits)), peak, argmax, largest=True)
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    for block in blocks:
        edge_apply(block, EdgeMessage(Op.SUB, _of_edges(logits), _of_destinations(peak)), out)
    out.exp_()
    total = torch.zeros_like(peak)
    for block in blocks:
        aggregate_sum(block, EdgeMessage(Op.COPY, _of_edges(out)), total)
    for block in blocks:
        edge_apply(block, EdgeMessage(Op.DIV, _of_edges(out), _of_destinations(total)), out)
    return out.to(dtype)


def edge_softmax_backward(blocks: Sequence[EdgeBlock], out: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the logits, (E, *), from the softmax `out` and its gradient: out * (grad - sum of out * grad)."""
    dtype = torch.promote_types(out.dtype, torch.float32)
    weight, grad = out.to(dtype), grad.to(dtype)
    total = out.new_zeros((max((block.num_dst for block in blocks), default=0), *out.shape[1:]), dtype=dtype)
    for block in blocks:
        aggregate_sum(block, EdgeMessage(Op.MUL, _of_edges(weight), _of_edges(grad)), total)
    grad_logits = torch.empty_like(weight, memory_format=torch.contiguous_format)
    for block in blocks:
        edge_apply(block, EdgeMessage(Op.SUB, _of_edges(grad), _of_destinations(total)), grad_logits)
    return grad_logits.mul_(weight).to(out.dtype)


def _of_edges(values: Tensor) -> EdgeOperand:
    return EdgeOperand.of(values, Target.E)


def _of_destinations(values: Tensor) -> EdgeOperand:
    return EdgeOperand.of(values, Target.V)
