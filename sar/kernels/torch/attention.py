"""One-pass attention in plain torch: what runs on GPUs, and the oracle of the compiled loops.

Edges are taken a chunk at a time, so that rows of features gathered for edges stay within `edge_chunks.CHUNK_ELEMENTS`.
Of a block's edges as a whole only scores are kept, (E_block, H).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from sar.kernels.attention_operands import (
    GRAD_DOT,
    INVERSE,
    PEAK,
    Attention,
    AttentionOperands,
    Gradients,
    OnlineSoftmaxState,
)
from sar.kernels.edge_block import EdgeBlock
from sar.kernels.torch.edge_chunks import EdgeChunk, edge_chunks

# Of SplitMix64, as int64.
HASH_STEP, HASH_1, HASH_2 = (value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def attend(block: EdgeBlock, how: Attention, operands: AttentionOperands, state: OnlineSoftmaxState) -> None:
    """Reference of `sar.kernels.attention.attend`."""
    out, peak, total = state
    features = tuple(operands.x.shape[1:])
    score = operands.x.new_empty(block.num_edges, operands.x.shape[1])
    greatest = peak.clone()
    for edges in edge_chunks(block, features):
        here = _scores(how, operands, edges)
        score[edges.begin : edges.end] = here
        dst = edges.dst.unsqueeze(1).expand_as(here)
        greatest.scatter_reduce_(0, dst, here.nan_to_num(-torch.inf, torch.inf), "amax")
    shrink = torch.where(greatest > peak, (peak - greatest).exp(), 1)
    total *= shrink
    out *= shrink.unsqueeze(2)
    peak.copy_(greatest)
    for edges in edge_chunks(block, features):
        here = score[edges.begin : edges.end]
        # -inf weighs nothing, even where all scores are; NaN goes through.
        weight = torch.where(here == -torch.inf, 0, (here - peak[edges.dst]).exp())
        total.index_add_(0, edges.dst, weight)
        weight *= _shares(how, operands, edges)[1]
        out.index_add_(0, edges.dst, operands.x[edges.src].mul_(weight.unsqueeze(2)))


def project(x: Tensor, attn: Tensor) -> Tensor:
    """Reference of `sar.kernels.attention.project`."""
    return (x * attn).sum(-1)


def project_grad(x: Tensor, attn: Tensor, grad: Tensor, x_grad: Tensor, attn_grad: Tensor) -> None:
    """Reference of `sar.kernels.attention.project_grad`."""
    x_grad.add_(grad.unsqueeze(2) * attn)
    attn_grad.add_((grad.unsqueeze(2) * x).sum(0))


def head_sums(how: Attention, grad: Tensor, out: Tensor, stats: Tensor) -> None:
    """Write the sums of grad * out over each head to stats[:, GRAD_DOT]."""
    stats[:, GRAD_DOT] = (grad * out).sum(-1)


def attend_grad(
    block: EdgeBlock, how: Attention, operands: AttentionOperands, grad: Tensor, stats: Tensor, grads: Gradients
) -> None:
    """Reference of `sar.kernels.attention.attend_grad`; see `Backend`."""
    for edges in edge_chunks(block, tuple(operands.x.shape[1:])):
        score = _scores(how, operands, edges)
        softmax = (score - stats[edges.dst, PEAK]).exp() * stats[edges.dst, INVERSE]
        kept, share = _shares(how, operands, edges)
        out_grad = grad[edges.dst]
        grad_dot = (out_grad * operands.x[edges.src]).sum(-1)
        if grads.weight is not None:
            grads.weight[edges.ids] = (softmax * kept * grad_dot).sum(1)
        score_grad = softmax * (share * grad_dot - stats[edges.dst, GRAD_DOT])
        grads.x.index_add_(0, edges.src, out_grad.mul_((softmax * share).unsqueeze(2)))
        if grads.x_score is None:
            _add_pair_grads(how, operands, edges, score_grad.unsqueeze(2), grads)
            continue
        raw_grad = torch.where(score > 0, score_grad, score_grad * how.factor)
        grads.x_score.index_add_(0, edges.src, raw_grad)
        grads.y.index_add_(0, edges.dst, raw_grad)


def _add_pair_grads(
    how: Attention, operands: AttentionOperands, edges: EdgeChunk, score_grad: Tensor, grads: Gradients
) -> None:
    """Add what DYNAMIC and DOT scores, of gradient (chunk, H, 1), give to their operands."""
    x, y = operands.x[edges.src], operands.y[edges.dst]
    if operands.attn is None:
        score_grad = how.factor * score_grad
        grads.x.index_add_(0, edges.src, y.mul_(score_grad))
        grads.y.index_add_(0, edges.dst, x.mul_(score_grad))
        return
    assert grads.attn is not None
    raw = x.add_(y)
    grads.attn.add_((score_grad * leaky_relu(raw, how.factor)).sum(0))
    raw_grad = operands.attn * torch.where(raw > 0, score_grad, score_grad * how.factor)
    grads.x.index_add_(0, edges.src, raw_grad)
    grads.y.index_add_(0, edges.dst, raw_grad)


def _scores(how: Attention, operands: AttentionOperands, edges: EdgeChunk) -> Tensor:
    """(chunk, H)"""
    if operands.x_score is not None:
        return leaky_relu(operands.x_score[edges.src] + operands.y[edges.dst], how.factor)
    x, y = operands.x[edges.src], operands.y[edges.dst]
    if operands.attn is None:
        return how.factor * x.mul_(y).sum(-1)
    return leaky_relu(x.add_(y), how.factor).mul_(operands.attn).sum(-1)


def _shares(how: Attention, operands: AttentionOperands, edges: EdgeChunk) -> tuple[Tensor, Tensor]:
    """What dropout multiplies weights with, and what both dropout and edge weights do; (chunk, H) or (1, 1) each."""
    kept = operands.x.new_ones(1, 1)
    if how.dropout:
        kept = dropout_factors(how, edges.ids, operands.x.shape[1], operands.x.dtype)
    return kept, kept if operands.weight is None else kept * operands.weight[edges.ids].unsqueeze(1)


def dropout_factors(how: Attention, ids: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """What dropout multiplies the weights of edges with, (edges, heads); the same numbers as in the compiled loops."""
    counter = ids.unsqueeze(1) * heads + torch.arange(1, heads + 1, device=ids.device)
    z = counter * HASH_STEP + (how.seed - 2**64 * (how.seed >= 2**63))  # int64 wraps around as uint64 does
    z = (z ^ _shift(z, 30)) * HASH_1
    z = (z ^ _shift(z, 27)) * HASH_2
    z = z ^ _shift(z, 31)
    keep = 1 - how.dropout
    kept: Tensor = _shift(z, 32) >= round(how.dropout * 2**32)
    return kept.to(dtype) * (1 / keep if keep > 0 else 0.0)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift right without the sign."""
    shifted: Tensor = (z >> bits) & (2 ** (64 - bits) - 1)
    return shifted
