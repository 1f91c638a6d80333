"""The arguments of attention over the edges of a block: kind of score, operands, running sums and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

PEAK, INVERSE, GRAD_DOT, SCORE = 0, 1, 2, 3
"""Rows of a destination's statistics: see `sar.kernels.attention.destination_statistics`."""
STATISTICS = 4  # rows


class Score(IntEnum):
    """How the logit of an edge is made of source features x, (D,) a head, and its destination's y."""

    ADDITIVE = 0  # leaky_relu(attn . x + y), with a number y a head: Velickovic 2018, "Graph attention networks"
    DYNAMIC = 1  # attn . leaky_relu(x + y): Brody 2022, "How attentive are graph attention networks?"
    DOT = 2  # factor * x . y


class Attention(NamedTuple):
    """The settings of a call, for all of its edges."""

    score: Score
    factor: float  # slope of the leaky ReLU below 0, at least 0; for DOT the factor of the products
    dropout: float = 0.0  # probability with which a weight becomes 0; the others grow by 1 / (1 - dropout)
    seed: int = 0  # of dropout; a weight's fate depends on it, the edge ID and the head only

    @property
    def drop_below(self) -> int:
        """Weights whose hash of 32 bits is below this are dropped; 0: none."""
        return round(self.dropout * 2**32)

    @property
    def kept_scale(self) -> float:
        """The factor of weights that are not dropped."""
        return 1 / (1 - self.dropout) if self.dropout < 1 else 0.0


class AttentionOperands(NamedTuple):
    """Operands of a block's edges, of one dtype: float32 or float64."""

    x: Tensor  # (num_src, H, D) features of the sources
    y: Tensor  # of the destinations: (num_dst, H) for ADDITIVE scores, else features (num_dst, H, D)
    attn: Tensor | None  # (H, D); None for DOT
    weight: Tensor | None  # (edges,) factor of the softmax of each edge; None stands for 1
    x_score: Tensor | None = None  # (num_src, H) `project(x, attn)` of ADDITIVE scores; None: not computed yet

    def reads_edges(self, how: Attention) -> bool:
        """Whether edge IDs matter: to dropout, and to find weights."""
        return how.dropout > 0 or self.weight is not None


class OnlineSoftmaxState(NamedTuple):
    """Sums over the edges so far, relative to exp(peak)."""

    out: Tensor  # (num_dst, H, D) weighted sum
    peak: Tensor  # (num_dst, H) the greatest score
    total: Tensor  # (num_dst, H) sum of the exponentials

    @classmethod
    def start(cls, num_dst: int, x: Tensor) -> OnlineSoftmaxState:
        """The sums over no edges, for source features like x, (*, H, D)."""
        heads = x.new_zeros(num_dst, x.shape[1])
        return cls(x.new_zeros(num_dst, *x.shape[1:]), torch.full_like(heads, -torch.inf), heads)

    def finish(self, in_degrees: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted mean, (num_dst, H, D), 0 without in-edges, and the normaliser of scores, (num_dst, 2, H).

        The normaliser is the peak and 1 / total: a weight is exp(score - peak) / total. One number, peak + log(total),
        would lose the total if scores are large.
        """
        total = self.total.masked_fill_((in_degrees == 0).unsqueeze(1), 1)
        out = self.out.div_(total.unsqueeze(2))
        return out, torch.stack([self.peak, total.reciprocal_()], 1)


def raise_peaks(peak: Tensor, sums: Sequence[Tensor], rows: Tensor | slice, greatest: Tensor) -> None:
    """Raise rows of peaks, (num_dst, H), to the greatest score, and shrink the sums that are relative to exp(peak)."""
    before = peak[rows]
    shrink = torch.where(greatest > before, (before - greatest).exp(), 1).unsqueeze(2)
    peak[rows] = greatest
    for total in sums:
        part = total[rows]  # of a slice, a view
        part.view(*greatest.shape, part.shape[1:].numel() // max(greatest.shape[1], 1)).mul_(shrink)
        if isinstance(rows, Tensor):
            total[rows] = part


class Gradients(NamedTuple):
    """Gradients of `AttentionOperands`, to which `attend_grad` adds; shapes as there."""

    x: Tensor
    y: Tensor
    attn: Tensor | None
    weight: Tensor | None
    x_score: Tensor | None = None
