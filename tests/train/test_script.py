"""`sar.print` and `sar.seed` on several workers."""

import contextlib
import io
import random

import numpy as np
import pytest
import torch

import sar
from sar.errors import ConfigError


def say_and_draw(n):
    """What a worker prints, and what its generators draw from a seed, from it again, and from another."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        sar.print("epoch", 1, sep=" = ", end=".")
    draws = []
    for seed in (n, n, n + 1):
        sar.seed(seed)
        draws.append((torch.rand(8).tolist(), np.random.rand(8).tolist(), [random.random() for _ in range(8)]))  # noqa: NPY002
    return said.getvalue(), draws


@pytest.mark.parametrize("world_size", [3])
@pytest.mark.parametrize("n", [0, 2**32 - 2])
def test_worker_0_speaks_and_all_draw_other_numbers(pool, n):
    said, draws = zip(*pool.run(say_and_draw, n), strict=True)
    assert said == ("epoch = 1.", "", "")
    assert all(first == again for first, again, _ in draws)
    streams = [tuple(stream) for first, _, other in draws for of_one in (first, other) for stream in of_one]
    assert len(set(streams)) == len(streams)
    torch.manual_seed(n)
    assert draws[0][0][0] == torch.rand(8).tolist()


def test_a_seed_that_not_all_generators_take():
    with pytest.raises(ConfigError, match="seed got -1"):
        sar.seed(-1)
