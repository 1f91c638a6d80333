"""The softmax over in-edges whose scores come block by block: one pass for the peaks and sums, one for the weights.

Exponentials are relative to the greatest score of their destination so far, its peak. If a block raises the peak, sums
of exponentials shrink (`raise_peaks`). The kernels of attention fuse this with the scores and the weighted sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from sar.kernels.aggregate import aggregate_cmp, aggregate_sum, edge_apply
from sar.kernels.attention_operands import raise_peaks
from sar.kernels.edge_block import EdgeBlock, index_dtype
from sar.kernels.ops import EdgeMessage, EdgeOperand, Op, Target
from sar.tensor_views import accumulation_dtype

_of_edges, _of_destinations = (partial(EdgeOperand.of, target=target) for target in (Target.E, Target.V))


class OnlineSoftmax:
    """Exponentials of scores, relative to the greatest score of each destination so far.

    Args:
        num_dst: number of destinations.
        sums: sums at destinations, (num_dst, ...), that are proportional to the exponentials: the first elements of a
            row to those of the first head, as many to those of the second, and so on.
        peak: (num_dst, H) greatest scores, -inf without in-edges; None before the first scores.
    """

    def __init__(self, num_dst: int, sums: Sequence[Tensor] = (), peak: Tensor | None = None) -> None:
        self.num_dst = num_dst
        self.sums = sums
        self.peak = peak

    def rise(self, scores: Tensor, *blocks: EdgeBlock) -> Tensor:
        """Take in the scores of blocks, (edges, *heads), by edge ID; returns their exponentials, as `exponentials`."""
        rows = scores.detach().reshape(len(scores), scores.shape[1:].numel())
        shape, dtype = (self.num_dst, rows.shape[1]), accumulation_dtype(rows.dtype)
        if self.peak is None:
            self.peak = rows.new_full(shape, -torch.inf, dtype=dtype)
        greatest, argmax = self.peak.clone(), rows.new_full(shape, -1, dtype=index_dtype(len(rows)))
        for block in blocks:
            aggregate_cmp(block, EdgeMessage(Op.COPY, _of_edges(rows)), greatest, argmax, largest=True)
        raise_peaks(self.peak, self.sums, slice(None), greatest)
        return self.exponentials(scores, *blocks)

    def exponentials(self, scores: Tensor, *blocks: EdgeBlock) -> Tensor:
        """exp(score - peak) of the edges of blocks, like the scores."""
        assert self.peak is not None
        peak = self.peak.masked_fill(self.peak == -torch.inf, 0)  # -inf weighs nothing, even where all scores are
        of_edges = scores.new_empty(len(scores), peak.shape[1])
        for block in blocks:
            edge_apply(block, EdgeMessage(Op.COPY, _of_destinations(peak)), of_edges)
        return (scores - of_edges.view(scores.shape)).exp()


def edge_softmax_forward(blocks: Sequence[EdgeBlock], logits: Tensor) -> Tensor:
    """exp(x_e) / sum of exp(x_i) over the edges i into the destination of e, computed from the greatest x_i.

    The blocks' edge IDs are, together, 0 to E - 1; a destination's edges may lie in several. Logits and results are
    (E, *). Results are NaN for destinations with a logit that is NaN or +inf or with all of them -inf.
    """
    num_dst = max((block.num_dst for block in blocks), default=0)
    out = OnlineSoftmax(num_dst).rise(logits.to(accumulation_dtype(logits.dtype)), *blocks)
    total = out.new_zeros(num_dst, *out.shape[1:])
    for block in blocks:
        aggregate_sum(block, EdgeMessage(Op.COPY, _of_edges(out)), total)
    for block in blocks:
        edge_apply(block, EdgeMessage(Op.DIV, _of_edges(out), _of_destinations(total)), out)
    return out.to(logits.dtype)


def edge_softmax_backward(blocks: Sequence[EdgeBlock], out: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the logits, (E, *), from the softmax `out` and its gradient: out * (grad - sum of out * grad)."""
    dtype = accumulation_dtype(out.dtype)
    weight, grad = out.to(dtype), grad.to(dtype)
    total = weight.new_zeros(max((block.num_dst for block in blocks), default=0), *out.shape[1:])
    for block in blocks:
        aggregate_sum(block, EdgeMessage(Op.MUL, _of_edges(weight), _of_edges(grad)), total)
    grad_logits = torch.empty_like(weight, memory_format=torch.contiguous_format)
    for block in blocks:
        edge_apply(block, EdgeMessage(Op.SUB, _of_edges(grad), _of_destinations(total)), grad_logits)
    return grad_logits.mul_(weight).to(out.dtype)
