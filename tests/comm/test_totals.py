"""`all_sum` and `all_max`, against the same of all workers' values side by side."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch

import sar
from sar.errors import ConfigError
from tests.core.attempts import catch_and_recover

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.uint8, torch.bool]
SHAPES = [(), (0, 2), (4, 3)]


class Pair(NamedTuple):
    loss: float
    counts: torch.Tensor


def mine_of(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(0, 9, shape, generator=generator).to(dtype) for shape in SHAPES for dtype in DTYPES]


def of_tensors():
    mine = [x.requires_grad_(x.is_floating_point()) for x in mine_of(sar.rank())]
    with torch.no_grad():
        assert not any(found.requires_grad for x in mine for found in (sar.all_sum(x), sar.all_max([x])[0]))
    made = [(x, sar.all_sum(x), sar.all_max(x)) for x in mine]
    for x, *both in made:
        for call, found in zip(("all_sum", "all_max"), both, strict=True):
            assert found.requires_grad == x.requires_grad
            if found.requires_grad:  # a backward would leave out what comes through the other workers
                with pytest.raises(ConfigError, match=f"sar.{call} has no gradient. In a model use sar.nn.global_sum"):
                    (x.sum() * found.sum()).backward()
                found += 0
    assert all(torch.equal(x, before) for x, before in zip(mine, mine_of(sar.rank()), strict=True))
    assert all(y.data_ptr() != x.data_ptr() for x, *both in made for y in both if len(x.flatten()))
    return [(total, most) for _, total, most in made]


@pytest.mark.parametrize("world_size", [1, 3])
def test_new_tensors_whose_backward_raises(pool, world_size):
    stacked = [torch.stack(values) for values in zip(*map(mine_of, range(world_size)), strict=True)]
    for result in pool.run(of_tensors):
        for (total, most), values in zip(result, stacked, strict=True):
            assert torch.equal(total, values.sum(0))
            assert total.dtype is values.sum(0).dtype
            assert torch.equal(most, values.amax(0))
            assert most.dtype is values.dtype


def of_others():
    rank = sar.rank()
    numbers = {"count": rank + 2**60, "loss": [0.1 * rank, True], "pair": Pair(np.float32(rank), torch.ones(2))}
    nan = torch.tensor([math.nan if rank == 1 else 1.0, math.nan if rank == 0 else 2.0, -math.inf])
    return sar.all_sum(numbers), sar.all_max(rank), sar.all_max((rank > 0, -math.inf)), sar.all_max(nan)


@pytest.mark.parametrize("world_size", [2])
def test_numbers_and_collections(pool):
    for total, rank, both, nan in pool.run(of_others):
        assert total["count"] == 2**61 + 1
        assert total["loss"] == [0.1, 2]
        assert isinstance(total["pair"], Pair)
        assert total["pair"].loss == 1.0
        assert total["pair"].counts.tolist() == [2.0, 2.0]
        assert rank == 1
        assert isinstance(rank, int)
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


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("what", ["dtype", "order", "text"])
def test_what_is_not_alike_is_an_error_on_all(pool, what):
    failures = pool.run(unlike, what)
    if what == "text":
        assert failures[1].kind == "ConfigError"
        assert "all_sum got a str" in failures[1].message
        assert "all_sum got a str" in failures[0].message
    else:
        assert [failure.kind for failure in failures] == ["DisagreementError"] * 2
