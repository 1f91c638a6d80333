"""Ranks and AUC over workers, against counting pair by pair in Python."""

import math

import pytest
import torch

import sar
from sar.train.metrics import hits_at_k, mean_reciprocal_rank, roc_auc
from tests.core.attempts import catch, require


def scores_of(rank, count):
    """Few distinct values, so that many are equal; none on worker 1."""
    generator = torch.Generator().manual_seed(rank)
    count = 0 if rank == 1 else count
    positive = torch.randint(-2, 3, (count,), generator=generator).double()
    return positive, torch.randint(-3, 2, (count, 4), generator=generator).double()


def measure(count):
    positive, negative = scores_of(sar.rank(), count)
    ranks = mean_reciprocal_rank(positive, negative)
    negative = negative.flatten()
    return ranks, roc_auc(positive, negative), roc_auc(negative[:0], negative), roc_auc(positive, negative[:0])


@pytest.mark.parametrize("world_size", [1, 3])
def test_ties_and_workers_without_pairs(pool, world_size):
    pairs = [
        (p, n) for rank in range(world_size) for p, n in zip(*(s.tolist() for s in scores_of(rank, 50)), strict=True)
    ]
    ranks = [1 + sum((x > p) + (x == p) / 2 for x in n) for p, n in pairs]
    negative = [x for _, n in pairs for x in n]
    wins = sum((p > x) + (p == x) / 2 for p, _ in pairs for x in negative)
    for mrr, auc, *undefined in pool.run(measure, 50):
        assert mrr == pytest.approx(sum(1 / rank for rank in ranks) / len(pairs), rel=1e-14)
        assert auc == wins / (len(pairs) * len(negative))
        assert all(map(math.isnan, undefined))
    assert all(math.isnan(value) for value in pool.run(measure, 0)[0])


def hits(count):
    positive, negative = scores_of(sar.rank(), count)
    return [hits_at_k(positive, negative, k) for k in (1, 2, 3)], [
        hits_at_k(positive, negative.flatten()[:7], k) for k in (1, 5, 20, 100)
    ]


@pytest.mark.parametrize("world_size", [1, 3])
def test_hits(pool, world_size):
    scores = [scores_of(rank, 50) for rank in range(world_size)]
    pairs = [(p, n) for of in scores for p, n in zip(*(s.tolist() for s in of), strict=True)]
    ranks = [1 + sum((x > p) + (x == p) / 2 for x in n) for p, n in pairs]
    shared = sorted((x for _, negative in scores for x in negative.flatten()[:7].tolist()), reverse=True)
    of_rank = [sum(rank <= k for rank in ranks) / len(ranks) for k in (1, 2, 3)]
    of_all = [sum(len(shared) < k or p > shared[k - 1] for p, _ in pairs) / len(pairs) for k in (1, 5, 20, 100)]
    assert pool.run(hits, 50) == [(of_rank, of_all)] * world_size
    assert all(math.isnan(value) for values in pool.run(hits, 0)[0] for value in values)


def broken_scores():
    nan, finite = torch.full((2,), math.nan), torch.zeros(2)
    best = torch.full((2, 1), -math.inf)
    return [
        mean_reciprocal_rank(nan, best),
        mean_reciprocal_rank(finite, nan.unsqueeze(1)),
        roc_auc(nan, finite),
        roc_auc(finite, nan),
        hits_at_k(nan, finite, 3),
        hits_at_k(finite, nan, 1),
    ]


@pytest.mark.parametrize("world_size", [1])
def test_nan_is_never_a_good_score(pool):
    assert pool.run(broken_scores) == [[0.5, 0.5, 0.0, 0.0, 0.0, 0.0]]


def refused(k):
    sar.comm.all_reduce(torch.ones(1))  # a virtual worker does not begin where another has ended with an error
    return catch(hits_at_k, torch.zeros(2), torch.zeros(2 + sar.rank(), 3), k)


@pytest.mark.parametrize("k, words", [(0, "k is 0"), (1, "The scores are (2,) and (3, 3)")])
@pytest.mark.parametrize("world_size", [3])
def test_what_is_refused_is_an_error_on_all(pool, k, words):
    failures = [require(failure) for failure in pool.run(refused, k)]
    assert words in failures[1].message
    assert all("SarError" in failure.bases for failure in failures)
