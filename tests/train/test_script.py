"""`sar.print` and `sar.seed` on several workers."""

import contextlib
import io
import random

import numpy as np
import pytest
import torch

import sar
from sar.errors import ConfigError


def say():
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        sar.print("epoch", 1, sep=" = ", end=".")
    return said.getvalue()


def draw(n):
    sar.seed(n)
    return torch.rand(8).tolist(), np.random.rand(8).tolist(), [random.random() for _ in range(8)]  # noqa: NPY002


def draw_twice(n):
    return draw(n), draw(n), draw(n + 1)


@pytest.mark.parametrize("world_size", [3])
def test_print_speaks_on_worker_0(pool):
    assert pool.run(say) == ["epoch = 1.", "", ""]


@pytest.mark.parametrize("world_size", [3])
@pytest.mark.parametrize("n", [0, 2**32 - 2])
def test_seeds(pool, n):
    workers = pool.run(draw_twice, n)
    assert all(first == again for first, again, _ in workers)
    streams = [stream for first, _, other in workers for draws in (first, other) for stream in draws]
    assert len(set(map(tuple, streams))) == len(streams)
    torch.manual_seed(n)
    assert workers[0][0][0] == torch.rand(8).tolist()


def refused():
    with pytest.raises(ConfigError, match="seed got -1"):
        sar.seed(-1)


@pytest.mark.parametrize("world_size", [1])
def test_a_seed_that_not_all_generators_take(pool):
    pool.run(refused)
