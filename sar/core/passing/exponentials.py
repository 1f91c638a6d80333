"""Exponentials of scores that a Python message function makes, relative to the greatest of each destination.

[Note: softmax in a message]
The softmax of scores over a node's in-edges is known only once all tiles are in. But where messages are proportional to
it, their sum is S / T: T is the sum of the exponentials, and S that of the messages with the exponentials in the place
of the softmax. So a message function asks for exponentials (`EdgeBatch.exponentials`) and makes both; S and T are
reduced alike. In the forward they are relative to the greatest score of the destination so far: where a tile raises
it, the sums shrink. In the backward the greatest score of all is known, and a constant, because it cancels in S / T.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from sar.core.passing.torch_reductions import places
from sar.core.relation import Relation
from sar.kernels import EdgeBlock

PEAKS = "peaks"
"""The name under which the greatest scores are returned."""


class Peaks:
    """The greatest scores of each destination so far.

    Args:
        relation: whose edges have scores, (E_block, *heads).
        totals: sums at destinations, (N_dst, ...), that are proportional to the exponentials: the first elements of a
            row to those of the first head, as many to those of the second, and so on.
        values: (N_dst, H), -inf without in-edges; None before the first scores.
    """

    def __init__(self, relation: Relation, totals: Sequence[Tensor], values: Tensor | None = None) -> None:
        self.relation = relation
        self.totals = totals
        self.values = values

    def rise(self, scores: Tensor, block: EdgeBlock) -> Tensor:
        """Take in the scores of a block, shrink the totals, and return the exponentials of the scores."""
        flat = by_head(scores.detach())
        if self.values is None:
            self.values = flat.new_full((self.relation.num_dst, flat.shape[1]), -torch.inf)
        rows, place = places(block, flat)
        before = self.values[rows]
        greatest = before.scatter_reduce(0, place, flat, "amax")
        self.values[rows] = greatest
        for total in self.totals:
            shrink = torch.where(greatest > before, (before.to(total.dtype) - greatest).exp(), 1).unsqueeze(2)
            some = total[rows]
            total[rows] = (by_head(some, flat.shape[1]) * shrink).view(some.shape)
        return self.exponentials(scores, block)

    def exponentials(self, scores: Tensor, block: EdgeBlock) -> Tensor:
        """exp(score - peak) of the edges of a block, (E_block, *heads)."""
        assert self.values is not None
        rows, place = places(block, by_head(scores))
        peaks = self.values[rows]
        peaks = peaks.masked_fill(peaks == -torch.inf, 0)  # -inf weighs nothing, even where all scores are
        return (scores - peaks.gather(0, place).view(scores.shape)).exp()


def by_head(rows: Tensor, heads: int | None = None) -> Tensor:
    """(N, ...) rows as (N, H, elements of a head); as (N, elements) where there is no number of heads."""
    size = prod(rows.shape[1:])
    return rows.reshape(len(rows), size) if heads is None else rows.reshape(len(rows), heads, size // heads)
