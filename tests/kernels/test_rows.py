"""Loops over the elements of a row against plain NumPy: the exponential, and sums over runs of any length."""

import math

import numpy as np
import pytest

from sar.host.compiler import kernel
from sar.kernels.cpu.csr_view import NO_INDICES, CSRView
from sar.kernels.cpu.rows import add_leaky, add_scaled, add_slopes, dot, dot_leaky, exponentials, row_sums, scale


@kernel
def run_exponentials(values):
    exponentials(values, np.uint64(values.size))


def made(values):
    out = values.copy()
    run_exponentials(out)
    return out


def test_float32_to_three_units_in_the_last_place():
    """Over all that softmax needs."""
    values = np.linspace(-87, 60, 1_000_001).astype(np.float32)
    exact = np.exp(values.astype(np.float64))
    assert np.max(np.abs(made(values) - exact) / exact) < 3 * np.finfo(np.float32).eps


@pytest.mark.parametrize("more", [0, 40])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_special_values(dtype, more):
    """What is too small is 0, what is too large is not small, and NaN is NaN, wherever in a vector."""
    for shift in range(6 + more):
        values = np.array([0.0, -0.0, -1000.0, -math.inf, math.nan, 1000.0] + [1.0] * more, dtype=dtype)
        out = np.roll(made(np.roll(values, shift)), -shift)
        assert list(out[:4]) == [1.0, 1.0, 0.0, 0.0]
        assert math.isnan(out[4])
        assert out[5] > 1e38


def test_float64_is_the_librarys():
    values = np.linspace(-700, 700, 10_001)
    assert made(values) == pytest.approx(np.exp(values), rel=1e-15)


SLOPE, FACTOR = 0.2, -1.7


@kernel
def run_all(length, a, x, y, sums, rows):
    """Every function once, each adding to two elements or rows that start at 1."""
    one, step, slope, factor = np.uint64(1), length, a.dtype.type(SLOPE), a.dtype.type(FACTOR)
    sums[0] += dot(length, a, one, x, one)
    sums[1] += dot_leaky(length, a, one, x, one, y, one, slope)
    add_scaled(length, rows, one, a, one, factor)
    scale(length, rows, one + step, factor)
    add_leaky(length, rows, one + np.uint64(2) * step, x, one, y, one, slope, factor)
    add_slopes(length, rows, one + np.uint64(3) * step, a, one, x, one, y, one, slope, factor)


@pytest.mark.parametrize("length", [0, 1, 3, 7, 8, 9, 31, 32, 33, 40, 41, 64, 75])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_runs_of_any_length(dtype, length):
    """As NumPy does it, at odd addresses, and nothing beside the run."""
    rng = np.random.default_rng(length)
    a, x, y = (rng.standard_normal(length + 1).astype(dtype) for _ in range(3))
    sums, rows = np.ones(2, dtype), np.ones(4 * length + 2, dtype)
    run_all(np.uint64(length), a, x, y, sums, rows)
    a, x, y = a[1:], x[1:], y[1:]
    slopes = np.where(x + y > 0, 1, SLOPE)
    leaky = slopes * (x + y)
    scaled = np.full(length, FACTOR - 1)
    wanted = np.concatenate([[0], FACTOR * a, scaled, FACTOR * leaky, FACTOR * a * slopes, [0]]) + 1
    tolerance = 1e-5 if dtype is np.float32 else 1e-12
    np.testing.assert_allclose(rows, wanted, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(sums, [1 + a @ x, 1 + a @ leaky], rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("length", [1, 5, 8, 16, 33, 56, 64, 131])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_are_added_one_after_the_other(dtype, length):
    """To the last bit, so that sums depend neither on chunks nor on threads; nothing beside the columns is written."""
    rng = np.random.default_rng(length)
    width, edges = length + 3, 37
    rows, factors = rng.standard_normal((9, width)).astype(dtype), rng.standard_normal(edges).astype(dtype)
    other = rng.integers(0, 9, edges).astype(np.int32)
    csr = CSRView(NO_INDICES, np.array([0, edges], np.int32), other, NO_INDICES, NO_INDICES, np.uint64(0))
    together, apart = np.ones(length + 2, dtype), np.ones(length + 2, dtype)
    add_together(csr, rows.reshape(-1), np.uint64(2), np.uint64(width), np.uint64(length), together, factors)
    for p in range(1, edges):
        add_apart(np.uint64(length), apart, rows[other[p], 2:].copy(), factors[p : p + 1])
    np.testing.assert_array_equal(together, apart)


_add_rows = row_sums(lambda p, factors: factors[p])


@kernel
def add_together(csr, rows, i, width, length, out, factors):
    one = np.uint64(1)
    _add_rows(csr, one, np.uint64(csr.other.size), rows, i, width, length, out, one, False, factors)


@kernel
def add_apart(length, out, row, factors):
    add_scaled(length, out, np.uint64(1), row, np.uint64(0), factors[0])
