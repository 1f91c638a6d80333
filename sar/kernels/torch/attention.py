"""One-pass attention in plain torch: the oracle of the compiled loops, and the fallback for them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from sar.kernels.attention_operands import ALONG, LOG_TOTAL, Attention, Ends, Gradients, Running
from sar.kernels.edge_block import EdgeBlock

# Of SplitMix64, as int64.
HASH_STEP, HASH_1, HASH_2 = (value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def attend(block: EdgeBlock, how: Attention, ends: Ends, from_score: Tensor | None, running: Running) -> None:
    """Reference of `sar.kernels.attention.attend`."""
    src, dst, ids = _edges(block)
    score = _scores(how, ends, from_score, src, dst)
    out, peak, total = running
    here = torch.full_like(peak, -torch.inf)
    here.scatter_reduce_(0, dst.unsqueeze(1).expand_as(score), score.nan_to_num(-torch.inf, torch.inf), "amax")
    greatest = torch.maximum(peak, here)
    shrink = torch.where(greatest > peak, (peak - greatest).exp(), 1)
    total *= shrink
    out *= shrink.unsqueeze(2)
    peak.copy_(greatest)
    # -inf weighs nothing, even where all scores are; NaN goes through.
    value = torch.where(score == -torch.inf, 0, (score - peak[dst]).exp())
    total.index_add_(0, dst, value)
    share = _kept(how, ids, score) if ends.weight is None else _kept(how, ids, score) * ends.weight[ids].unsqueeze(1)
    out.index_add_(0, dst, (value * share).unsqueeze(2) * ends.x[src])


def project(x: Tensor, attn: Tensor) -> Tensor:
    """Reference of `sar.kernels.attention.project`."""
    return (x * attn).sum(-1)


def project_grad(x: Tensor, attn: Tensor, grad: Tensor, x_grad: Tensor, attn_grad: Tensor) -> None:
    """Reference of `sar.kernels.attention.project_grad`."""
    x_grad.add_(grad.unsqueeze(2) * attn)
    attn_grad.add_((grad.unsqueeze(2) * x).sum(0))


def head_sums(how: Attention, grad: Tensor, out: Tensor, stats: Tensor) -> None:
    """Write the sums of grad * out over each head to stats[:, ALONG]."""
    stats[:, ALONG] = (grad * out).sum(-1)


def attend_grad(
    block: EdgeBlock,
    how: Attention,
    ends: Ends,
    from_score: Tensor | None,
    grad: Tensor,
    stats: Tensor,
    grads: Gradients,
    from_score_grad: Tensor | None,
) -> None:
    """Reference of `sar.kernels.attention.attend_grad`, with the gradient of sources' scores left to the caller."""
    src, dst, ids = _edges(block)
    score = _scores(how, ends, from_score, src, dst)
    softmax = (score - stats[dst, LOG_TOTAL]).exp()
    kept = _kept(how, ids, score)
    share = kept if ends.weight is None else kept * ends.weight[ids].unsqueeze(1)
    x, grad = ends.x[src], grad[dst]
    along = (grad * x).sum(-1)
    score_grad = softmax * (share * along - stats[dst, ALONG])
    grads.x.index_add_(0, src, (softmax * share).unsqueeze(2) * grad)
    if grads.weight is not None:
        grads.weight[ids] = (softmax * kept * along).sum(1)
    if from_score_grad is not None:
        raw_grad = torch.where(score > 0, score_grad, score_grad * how.factor)
        from_score_grad.index_add_(0, src, raw_grad)
        grads.y.index_add_(0, dst, raw_grad)
        return
    score_grad, y = score_grad.unsqueeze(2), ends.y[dst]
    if ends.attn is None:
        grads.x.index_add_(0, src, how.factor * score_grad * y)
        grads.y.index_add_(0, dst, how.factor * score_grad * x)
        return
    assert grads.attn is not None
    raw_grad = ends.attn * torch.where(x + y > 0, score_grad, score_grad * how.factor)
    grads.x.index_add_(0, src, raw_grad)
    grads.y.index_add_(0, dst, raw_grad)
    grads.attn.add_((score_grad * leaky_relu(x + y, how.factor)).sum(0))


def _edges(block: EdgeBlock) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the sources, destinations and edges, (E_block,) each."""
    edges = block.num_edges
    return block.cols.long(), block.destinations(0, edges), block.ids(0, edges)


def _scores(how: Attention, ends: Ends, from_score: Tensor | None, src: Tensor, dst: Tensor) -> Tensor:
    """(E_block, H)"""
    if from_score is not None:
        return leaky_relu(from_score[src] + ends.y[dst], how.factor)
    x, y = ends.x[src], ends.y[dst]
    if ends.attn is None:
        return how.factor * (x * y).sum(-1)
    return (leaky_relu(x + y, how.factor) * ends.attn).sum(-1)


def _kept(how: Attention, ids: Tensor, like: Tensor) -> Tensor:
    """What dropout multiplies the weights of edges with, (E_block, H); the same numbers as in the compiled loops."""
    heads = like.shape[1]
    if not how.dropout:
        return torch.ones_like(like)
    counter = ids.unsqueeze(1) * heads + torch.arange(1, heads + 1, device=ids.device)
    z = counter * HASH_STEP + (how.seed - 2**64 * (how.seed >= 2**63))  # int64 wraps around as uint64 does
    z = (z ^ _shift(z, 30)) * HASH_1
    z = (z ^ _shift(z, 27)) * HASH_2
    z = z ^ _shift(z, 31)
    keep = 1 - how.dropout
    kept: Tensor = _shift(z, 32) >= round(how.dropout * 2**32)
    return kept.to(like.dtype) * (1 / keep if keep > 0 else 0.0)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift right without the sign."""
    shifted: Tensor = (z >> bits) & (2 ** (64 - bits) - 1)
    return shifted
