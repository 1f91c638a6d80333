"""How well a model scores pairs of nodes: metrics of link prediction, over the scores of all workers."""

import torch
from torch import Tensor

from sar.comm import session
from sar.comm.collectives import all_sum, exchange_tensors
from sar.errors import GraphError


def mean_reciprocal_rank(positive: Tensor, negative: Tensor) -> float:
    """The mean over all workers' positive pairs of 1 / (1 + negatives above it + half of those equal to it).

    Called by all workers together. Ranks are those of the Open Graph Benchmark's evaluator (Hu et al., 2020,
    arXiv:2005.00687), except that a score of NaN counts as the worst for the model.

    Args:
        positive: scores of this worker's positive pairs, (K,); K may be 0.
        negative: scores of the M negatives of each, (K, M).

    Returns:
        From 0 to 1; NaN where no worker has a pair.

    Raises:
        GraphError: for scores of other shapes.
    """
    with session.current_group().guard():
        if positive.dim() != 1 or negative.dim() != 2 or len(positive) != len(negative):
            raise GraphError(
                f"The scores are {tuple(positive.shape)} and {tuple(negative.shape)}; expected (K,) of positive pairs "
                "and (K, M) of the negatives of each."
            )
        below, equal = ((compared(negative, positive.unsqueeze(1))).sum(1) for compared in (torch.lt, torch.eq))
        ranks = 1 + negative.shape[1] - below.double() - equal.double() / 2
        total, count = all_sum((float(ranks.reciprocal().sum()), len(ranks)))
    return total / count if count else float("nan")


def roc_auc(positive: Tensor, negative: Tensor) -> float:
    """The share of (positive, negative) pairs of scores in which the positive is higher, equal ones counting half.

    Called by all workers together. It is counted in integers. Every worker holds the negatives' scores of all for the
    time of the call. A score of NaN counts as the worst for the model.

    Args:
        positive: scores of this worker's positive pairs, (K,); K may be 0.
        negative: scores of this worker's negative pairs, (M,), which need not belong to its positive ones.

    Returns:
        From 0 to 1; NaN where all workers together lack either.
    """
    with session.current_group().guard() as group:
        negative = torch.where(negative.isnan(), torch.inf, negative.detach())
        positive = torch.where(positive.isnan(), -torch.inf, positive.detach())
        everywhere = torch.cat(exchange_tensors([negative] * group.world_size)).to(positive.device).sort().values
        # Of each positive, the negatives below it and those up to it: together twice its wins.
        wins = sum(int(torch.searchsorted(everywhere, positive, right=equal).sum()) for equal in (False, True))
        twice_wins, count = all_sum((wins, len(positive)))
    compared = 2 * count * len(everywhere)
    return twice_wins / compared if compared else float("nan")
