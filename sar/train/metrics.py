"""Metrics of link prediction over the scores of all workers."""

import torch
from torch import Tensor

from sar.comm import session
from sar.comm.collectives import all_sum, exchange_tensors
from sar.errors import GraphError


def mean_reciprocal_rank(positive: Tensor, negative: Tensor) -> float:
    """Mean over all workers' positive pairs of 1 / (1 + negatives above it + half of the negatives equal to it).

    A collective call. Ranks are as in the Open Graph Benchmark's evaluator (Hu et al., 2020, arXiv:2005.00687), except
    that NaN counts as the worst possible score.

    Args:
        positive: scores of this worker's positive pairs, (K,); K may be 0.
        negative: scores of the M negatives of each positive pair, (K, M).

    Returns:
        From 0 to 1; NaN if no worker has a pair.

    Raises:
        GraphError: for scores of other shapes.
    """
    with session.current_group().guard():
        ranks = _ranks(positive, negative)
        total, count = all_sum((float(ranks.reciprocal().sum()), len(ranks)))
    return total / count if count else float("nan")


def hits_at_k(positive: Tensor, negative: Tensor, k: int) -> float:
    """Fraction of all workers' positive pairs that rank among the k best, as in the Open Graph Benchmark.

    A collective call. NaN counts as the worst possible score.

    Args:
        positive: scores of this worker's positive pairs, (K,); K may be 0.
        negative: scores of negatives. (M,), shared by the positive pairs of all workers: a pair is a hit if it is above
            the k-th best negative of all workers, as in ogbl-ddi and ogbl-collab. Or (K, M), for each positive pair: it
            is a hit if its rank, as in `mean_reciprocal_rank`, is at most k.
        k: at least 1, and the same on all workers.

    Returns:
        From 0 to 1; NaN if no worker has a pair.

    Raises:
        GraphError: for scores of other shapes, or an invalid k.
    """
    with session.current_group().guard() as group:
        if k < 1:
            raise GraphError(f"k is {k}; expected at least 1.")
        if negative.dim() == 1:
            negative = torch.where(negative.isnan(), torch.inf, negative.detach())
            best = torch.cat(exchange_tensors([negative.topk(min(k, len(negative))).values] * group.world_size))
            hit = positive > best.topk(k).values[-1].to(positive.device) if len(best) >= k else ~positive.isnan()
        else:
            hit = _ranks(positive, negative) <= k
        hits, count = all_sum((int(hit.sum()), len(positive)))
    return hits / count if count else float("nan")


def _ranks(positive: Tensor, negative: Tensor) -> Tensor:
    """The rank of each positive pair among its negatives, from 1, (K,) float64; ties count half."""
    if positive.dim() != 1 or negative.dim() != 2 or len(positive) != len(negative):
        raise GraphError(
            f"The scores are {tuple(positive.shape)} and {tuple(negative.shape)}; expected (K,) of positive pairs "
            "and (K, M) of the negatives of each."
        )
    below, equal = ((compared(negative, positive.unsqueeze(1))).sum(1) for compared in (torch.lt, torch.eq))
    return 1 + negative.shape[1] - below.double() - equal.double() / 2


def roc_auc(positive: Tensor, negative: Tensor) -> float:
    """Fraction of (positive, negative) pairs of scores in which the positive is higher; ties count half.

    A collective call, counted in integers. Every worker temporarily holds the negative scores of all workers. NaN
    counts as the worst possible score.

    Args:
        positive: scores of this worker's positive pairs, (K,); K may be 0.
        negative: scores of this worker's negative pairs, (M,), unrelated to the positive ones; M may be 0.

    Returns:
        From 0 to 1; NaN if there are no positive or no negative scores on all workers together.
    """
    with session.current_group().guard() as group:
        negative = torch.where(negative.isnan(), torch.inf, negative.detach())
        positive = torch.where(positive.isnan(), -torch.inf, positive.detach())
        everywhere = torch.cat(exchange_tensors([negative] * group.world_size)).to(positive.device).sort().values
        # Negatives below each positive plus negatives up to it: twice the number of its wins.
        wins = sum(int(torch.searchsorted(everywhere, positive, right=equal).sum()) for equal in (False, True))
        twice_wins, count = all_sum((wins, len(positive)))
    compared = 2 * count * len(everywhere)
    return twice_wins / compared if compared else float("nan")
