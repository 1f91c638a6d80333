"""One-pass attention over the edges of a block: the interface of its kernels.

Weights are softmax(score) over the in-edges of a destination, and the result is the sum of weight * source features.
Both come in one pass over blocks of edges, by `attend`; `OnlineSoftmaxState.finish` divides. Nothing has the size of
the edges.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sar.kernels.attention_operands import (
    INVERSE,
    SCORE,
    STATISTICS,
    Attention,
    AttentionOperands,
    Gradients,
    OnlineSoftmaxState,
    Score,
)
from sar.kernels.backend import choose
from sar.kernels.edge_block import EdgeBlock


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
    """The numbers of a destination that a backward reads together, side by side, (num_dst, STATISTICS, H).

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
