"""Softmax over in-edges, block by block, and attention in one pass over the blocks.

Exponentials are relative to the greatest score of their destination so far, its peak. If a block raises the peak, sums
of exponentials shrink (`raise_peaks`). Attention fuses this with the scores and the weighted sum. Weights are
softmax(score) over the in-edges of a destination, and the result is the sum of weight * source features. `attend` adds
a block, and `OnlineSoftmaxState.finish` divides. Nothing has the size of the edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from sar.kernels.api import aggregate_cmp, aggregate_sum, choose, edge_apply
from sar.kernels.edge_block import EdgeBlock, index_dtype
from sar.kernels.ops import (
    INVERSE,
    SCORE,
    STATISTICS,
    Attention,
    AttentionOperands,
    EdgeMessage,
    EdgeOperand,
    Gradients,
    OnlineSoftmaxState,
    Op,
    Score,
    Target,
    raise_peaks,
)
from sar.tensors.views import accumulation_dtype


def project(x: Tensor, attn: Tensor) -> Tensor:
    """Each head's product attn . x, (N, H), of (N, H, D) and (H, D)."""
    return choose(x).project(x, attn)


def project_grad(x: Tensor, attn: Tensor, grad: Tensor, x_grad: Tensor, attn_grad: Tensor) -> None:
    """Add the gradients of `project`, given that of its result, (N, H), to those of its operands."""
    choose(x).project_grad(x, attn, grad, x_grad, attn_grad)


def attend(block: EdgeBlock, how: Attention, operands: AttentionOperands, state: OnlineSoftmaxState) -> None:
    """Add the edges of a block to the sums of their destinations."""
    if block.num_edges:
        choose(operands.x).attend(block, how, _with_scores(how, operands), state)


def destination_statistics(how: Attention, normaliser: Tensor, grad: Tensor, out: Tensor) -> Tensor:
    """The numbers of a destination that a backward reads together, (num_dst, STATISTICS, H).

    These are the normaliser, (num_dst, 2, H), of `OnlineSoftmaxState.finish`, the sums of grad * out over heads, and
    room for `note_scores`. `grad` is the gradient of the result `out`, (num_dst, H, D), contiguous.
    """
    stats = normaliser.new_empty(len(normaliser), STATISTICS, normaliser.shape[2])
    stats[:, : INVERSE + 1] = normaliser
    if grad.numel():
        choose(grad).head_sums(how, grad, out, stats)
    return stats


def note_scores(how: Attention, stats: Tensor, y: Tensor) -> None:
    """Add `AttentionOperands.y` of ADDITIVE scores to the statistics of destinations."""
    if how.score is Score.ADDITIVE:
        stats[:, SCORE] = y


def attend_grad(
    block: EdgeBlock, how: Attention, operands: AttentionOperands, grad: Tensor, stats: Tensor, grads: Gradients
) -> None:
    """Add the gradients of a block's edges.

    Args:
        grad: (num_dst, H, D) gradient of the result, contiguous.
        stats: from `destination_statistics`, after `note_scores`.
        grads: where to add; of edge weights, those of this block's edges are written. Gradients of a given `x_score`
            are added there only: see `add_score_grads`.
    """
    if not block.num_edges:
        return
    scored = _with_scores(how, operands)
    if scored is not operands and scored.x_score is not None:
        grads = grads._replace(x_score=torch.zeros_like(scored.x_score))
    choose(operands.x).attend_grad(block, how, scored, grad, stats, grads)
    if scored is not operands:
        add_score_grads(scored, grads)


def add_score_grads(operands: AttentionOperands, grads: Gradients) -> None:
    """Add the gradients of `x_score` of ADDITIVE scores to those of its operands."""
    assert operands.attn is not None
    assert grads.attn is not None
    assert grads.x_score is not None
    project_grad(operands.x, operands.attn, grads.x_score, grads.x, grads.attn)


def _with_scores(how: Attention, operands: AttentionOperands) -> AttentionOperands:
    if how.score is not Score.ADDITIVE or operands.x_score is not None:
        return operands
    assert operands.attn is not None
    return operands._replace(x_score=project(operands.x, operands.attn))


# -- softmax of given scores

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
        """Add the scores of blocks, (edges, *heads), by edge ID; returns their exponentials, as `exponentials`."""
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
    out = OnlineSoftmax(num_dst).rise(logits.to(accumulation_dtype(logits.dtype)).contiguous(), *blocks)
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
