"""Softmax over the in-edges of each destination, made of the other kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sar.kernels.dispatch import aggregate_cmp, aggregate_sum, edge_apply
from sar.kernels.edge_block import EdgeBlock, index_dtype
from sar.kernels.ops import Op, Target


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
    winner = torch.full(shape, -1, dtype=index_dtype(logits.shape[0]), device=logits.device)
    for block in blocks:
        aggregate_cmp(block, Op.COPY, logits, Target.E, None, Target.E, peak, winner, largest=True)
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    for block in blocks:
        edge_apply(block, Op.SUB, logits, Target.E, peak, Target.V, out)
    out.exp_()
    total = torch.zeros_like(peak)
    for block in blocks:
        aggregate_sum(block, Op.COPY, out, Target.E, None, Target.E, total)
    for block in blocks:
        edge_apply(block, Op.DIV, out, Target.E, total, Target.V, out)
    return out.to(dtype)


def edge_softmax_backward(blocks: Sequence[EdgeBlock], out: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the logits, (E, *), from the softmax `out` and its gradient: out * (grad - sum of out * grad)."""
    dtype = torch.promote_types(out.dtype, torch.float32)
    weight, grad = out.to(dtype), grad.to(dtype)
    total = out.new_zeros((max((block.num_dst for block in blocks), default=0), *out.shape[1:]), dtype=dtype)
    for block in blocks:
        aggregate_sum(block, Op.MUL, weight, Target.E, grad, Target.E, total)
    grad_logits = torch.empty_like(weight, memory_format=torch.contiguous_format)
    for block in blocks:
        edge_apply(block, Op.SUB, grad, Target.E, total, Target.V, grad_logits)
    return grad_logits.mul_(weight).to(out.dtype)
