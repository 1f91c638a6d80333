"""What `all_sum` and `all_max` return, and what they refuse; `test_reductions.py` has the numbers of every dtype."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch

import sar
from sar.errors import ConfigError
from tests.core.attempts import catch_and_recover


class Pair(NamedTuple):
    loss: float
    counts: torch.Tensor


def new_tensors():
    """Of tensors that need a gradient and of others, a scalar and an empty one among them."""
    for x in (torch.ones(()), torch.ones(0, 2), torch.ones(3, requires_grad=True), torch.ones(3, dtype=torch.bool)):
        with torch.no_grad():
            assert not sar.all_sum(x).requires_grad
        for call in (sar.all_sum, sar.all_max):
            found = call(x)
            assert found.requires_grad == x.requires_grad
            assert found.shape == x.shape
            assert found.data_ptr() != x.data_ptr() or not x.numel()
            if found.requires_grad:  # a backward would leave out what comes through the other workers
                with pytest.raises(ConfigError, match=r"sar.all_\w+ has no gradient. In a model use sar.nn.global_sum"):
                    (x.sum() * found.sum()).backward()
                found += 0
        assert bool((x == 1).all())


@pytest.mark.parametrize("world_size", [1, 3])
def test_new_tensors_whose_backward_raises(pool, world_size):
    pool.run(new_tensors)


def of_others():
    rank = sar.rank()
    numbers = {"count": rank + 2**60, "loss": [0.1 * rank, True], "pair": Pair(np.float32(rank), torch.ones(2))}
    nan = torch.tensor([math.nan if rank == 1 else 1.0, math.nan if rank == 0 else 2.0, -math.inf])
    return sar.all_sum(numbers), sar.all_max((rank > 0, -math.inf)), sar.all_max(nan)


@pytest.mark.parametrize("world_size", [2])
def test_numbers_and_collections(pool):
    for total, both, nan in pool.run(of_others):
        assert total["count"] == 2**61 + 1
        assert total["loss"] == [0.1, 2]
        assert isinstance(total["pair"], Pair)
        assert total["pair"].loss == 1.0
        assert total["pair"].counts.tolist() == [2.0, 2.0]
        assert both == (True, -math.inf)
        assert both[0] is True
        assert nan.isnan().tolist() == [True, True, False]
        assert nan[2] == -math.inf


def unlike(what):
    odd = sar.rank() == 1
    mine = {
        "dtype": torch.ones(2, dtype=torch.float64 if odd else torch.float32),
        "order": {"b": 1, "a": 2} if odd else {"a": 2, "b": 1},
        "text": ["no number"] if odd else [1],
    }
    return catch_and_recover(sar.all_sum, mine[what])


@pytest.mark.parametrize("what", ["dtype", "order", "text"])
@pytest.mark.parametrize("world_size", [2])
def test_what_is_not_alike_is_an_error_on_all(pool, what):
    failures = pool.run(unlike, what)
    kinds = ["PeerError", "ConfigError"] if what == "text" else ["DisagreementError"] * 2
    assert [failure.kind for failure in failures] == kinds
    assert what != "text" or all("all_sum got a str" in failure.message for failure in failures)
