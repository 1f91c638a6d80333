"""One-pass attention over the edges of a block: how scores are made, and the interface of its kernels.

Weights are softmax(score) over the in-edges of a destination, and the result is the sum of weight * source features.
`softmax` and the sum come in one pass over blocks of edges, by `attend`; `finish` divides. Nothing edge-sized is made.
"""

from __future__ import annotations

from enum import IntEnum
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from sar.kernels import reference_attention
from sar.kernels.backend import numba_kernels
from sar.kernels.edge_block import EdgeBlock


class Score(IntEnum):
    """How the logit of an edge is made of source features x, (D,) a head, and its destination's y."""

    ADDITIVE = 0
    """leaky_relu(attn . x + y), with a number y a head: Velickovic 2018, "Graph attention networks"."""
    DYNAMIC = 1
    """attn . leaky_relu(x + y): Brody 2022, "How attentive are graph attention networks?\""""
    DOT = 2
    """factor * x . y"""


class Attention(NamedTuple):
    """What all edges of a call have in common.

    factor: slope of the leaky ReLU below 0, at least 0; of DOT what the products are multiplied with.
    dropout: probability with which a weight becomes 0; the others grow by 1 / (1 - dropout).
    seed: of dropout; a weight's fate depends on it, the edge ID and the head only.
    """

    score: Score
    factor: float
    dropout: float = 0.0
    seed: int = 0


class Ends(NamedTuple):
    """Operands of a block's edges, of one dtype: float32 or float64.

    x: (num_src, H, D) features of the sources.
    y: of the destinations: (num_dst, H) for ADDITIVE scores, else features (num_dst, H, D).
    attn: (H, D); None for DOT.
    weight: (edges,) what the softmax of each edge is multiplied with; None stands for 1.
    """

    x: Tensor
    y: Tensor
    attn: Tensor | None
    weight: Tensor | None


class Running(NamedTuple):
    """Sums over the edges so far, relative to exp(peak).

    out: (num_dst, H, D) weighted sum.
    peak: (num_dst, H) the greatest score.
    total: (num_dst, H) sum of the exponentials.
    """

    out: Tensor
    peak: Tensor
    total: Tensor

    @classmethod
    def start(cls, num_dst: int, x: Tensor) -> Running:
        """The sums over no edges, for source features like x, (*, H, D)."""
        heads = x.new_zeros(num_dst, x.shape[1])
        return cls(x.new_zeros(num_dst, *x.shape[1:]), torch.full_like(heads, -torch.inf), heads)

    def finish(self, in_degrees: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted mean, (num_dst, H, D), 0 without in-edges, and the logarithm of the sum, (num_dst, H)."""
        total = self.total.masked_fill_((in_degrees == 0).unsqueeze(1), 1)
        out = self.out.div_(total.unsqueeze(2))
        return out, self.peak.add_(total.log_())


class Gradients(NamedTuple):
    """Gradients of `Ends`, to which `attend_grad` adds; shapes as there."""

    x: Tensor
    y: Tensor
    attn: Tensor | None
    weight: Tensor | None


def project(x: Tensor, attn: Tensor) -> Tensor:
    """Each head's product attn . x, (N, H), of (N, H, D) and (H, D)."""
    product: Tensor = _kernels(x).project(x, attn)
    return product


def project_grad(x: Tensor, attn: Tensor, grad: Tensor, x_grad: Tensor, attn_grad: Tensor) -> None:
    """Add the gradients of `project`, given that of its result, (N, H), to those of its operands."""
    _kernels(x).project_grad(x, attn, grad, x_grad, attn_grad)


def attend(block: EdgeBlock, how: Attention, ends: Ends, running: Running) -> None:
    """Add the edges of a block to the running sums of their destinations."""
    if block.num_edges:
        from_score = project(ends.x, ends.attn) if how.score is Score.ADDITIVE and ends.attn is not None else None
        _kernels(ends.x).attend(block, how, ends, from_score, running)


def destination_statistics(how: Attention, log_total: Tensor, grad: Tensor, out: Tensor) -> Tensor:
    """What a backward needs of each destination, (num_dst, 2, H): log_total, and the sums of grad * out over heads."""
    stats = torch.stack([log_total, torch.empty_like(log_total)], dim=1)
    if grad.numel():
        _kernels(grad).head_sums(how, grad, out, stats)
    return stats


def attend_grad(block: EdgeBlock, how: Attention, ends: Ends, grad: Tensor, stats: Tensor, grads: Gradients) -> None:
    """Add the gradients of a block's edges.

    Args:
        block: the edges.
        how: as in the forward.
        ends: likewise.
        grad: (num_dst, H, D) gradient of the result, contiguous.
        stats: from `destination_statistics`.
        grads: where to add; of edge weights, those of this block's edges are written.
    """
    if not block.num_edges:
        return
    if how.score is not Score.ADDITIVE:
        _kernels(ends.x).attend_grad(block, how, ends, None, grad, stats, grads, None)
        return
    assert ends.attn is not None
    assert grads.attn is not None
    from_score = project(ends.x, ends.attn)
    from_score_grad = torch.zeros_like(from_score)
    _kernels(ends.x).attend_grad(block, how, ends, from_score, grad, stats, grads, from_score_grad)
    project_grad(ends.x, ends.attn, from_score_grad, grads.x, grads.attn)


def _kernels(x: Tensor) -> ModuleType:
    fit = x.device.type == "cpu" and x.numel() and numba_kernels() is not None
    if not fit:
        return reference_attention
    from sar.kernels import numba_attention

    return numba_attention
