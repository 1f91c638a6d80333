"""The exponential that compiled loops use."""

import math

import numpy as np
import pytest

from sar.kernels._numba import kernel
from sar.kernels.vectors import exp


@kernel
def exponentials(values, out):
    for i in range(np.uint64(values.size)):
        out[i] = exp(values[i])


def test_float32_to_three_units_in_the_last_place():
    """Over all that softmax needs; what is smaller than e**-87 is that, and NaN is NaN."""
    values = np.linspace(-87, 60, 1_000_001).astype(np.float32)
    out = np.empty_like(values)
    exponentials(values, out)
    exact = np.exp(values.astype(np.float64))
    assert np.max(np.abs(out - exact) / exact) < 3 * np.finfo(np.float32).eps
    special = np.array([0.0, -0.0, -100.0, -math.inf, math.nan], dtype=np.float32)
    out = np.empty_like(special)
    exponentials(special, out)
    assert list(out[:2]) == [1.0, 1.0]
    assert all(0 < value < 2e-38 for value in out[2:4])
    assert math.isnan(out[4])


def test_float64_is_the_librarys():
    values = np.linspace(-700, 700, 10_001)
    out = np.empty_like(values)
    exponentials(values, out)
    assert out == pytest.approx(np.exp(values), rel=1e-15)
