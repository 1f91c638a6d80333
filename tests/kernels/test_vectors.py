"""Vector code of compiled loops against plain NumPy: each intrinsic, the exponential, and sums over runs."""

import math

import numpy as np
import pytest

from sar.kernels.cpu.compile import kernel
from sar.kernels.cpu.vector import (
    add_dot,
    add_leaky,
    add_leaky_dot,
    add_product,
    add_scaled,
    add_slopes,
    exp,
    larger,
    line_length,
    over_columns,
    over_heads,
    prefetch,
    sum_of,
    where_positive,
)

LENGTH = 43
RESULTS = 8


def _writing_all(of):
    """A function that writes what every intrinsic makes of elements i on of x and y; x and y start at 1."""
    load, store, everywhere, ask = of.load, of.store, of.everywhere, of.prefetch
    length, one, far = np.uint64(LENGTH), np.uint64(1), np.uint64(2**40)

    def run(i, out, x, y, scalar):
        a, b = load(x, one + i), load(y, one + i)
        store(out, i, a)
        store(out, length + i, a + b)
        store(out, np.uint64(2) * length + i, a - b)
        store(out, np.uint64(3) * length + i, a * b)
        store(out, np.uint64(4) * length + i, larger(a, b))
        store(out, np.uint64(5) * length + i, where_positive(a, b, everywhere(scalar)))
        store(out, np.uint64(6) * length + i, everywhere(sum_of(b)))
        c = load(out, np.uint64(7) * length + i)
        c += b
        store(out, np.uint64(7) * length + i, c)
        ask(x, far)
        prefetch(x, far)

    return run


_all_columns, _all_heads = over_columns(_writing_all), over_heads(_writing_all)


@kernel
def all_intrinsics(out, x, y, scalar, heads):
    if heads:
        _all_heads(np.uint64(LENGTH), out, x, y, scalar)
    else:
        _all_columns(np.uint64(LENGTH), out, x, y, scalar)
    return line_length(x)


def plain_intrinsics(x, y, scalar, vector_lengths):
    """The same, one element and one vector after the other."""
    expected = np.zeros((RESULTS, LENGTH), x.dtype)
    for i, (a, b) in enumerate(zip(x, y, strict=True)):
        positive = b if a > 0 else scalar
        number = b if math.isnan(a) else a
        expected[:6, i] = a, a + b, a - b, a * b, max(number, b), positive
        expected[7, i] = b
    start = 0
    for length in vector_lengths:
        while start + length <= LENGTH:
            total = x.dtype.type(0)
            for value in y[start : start + length]:
                total += value
            expected[6, start : start + length] = total
            start += length
    return expected


@pytest.mark.parametrize(("heads", "vector_lengths"), [(True, (4, 1)), (False, (32, 8, 1))])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_intrinsic_is_its_plain_loop(dtype, heads, vector_lengths):
    """On vectors of every length, at odd addresses, NaN and infinities of the left operand included."""
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(LENGTH + 1).astype(dtype) for _ in range(2))
    x[[2, 9, 35, 43]], x[[5, 11, 36, 42]], x[[7, 30]] = math.nan, math.inf, 0.0
    out = np.zeros((RESULTS, LENGTH), dtype)
    line = all_intrinsics(out.reshape(-1), x, y, dtype(2.5), heads)
    assert line == 64 // dtype().itemsize
    expected = plain_intrinsics(x[1:], y[1:], dtype(2.5), vector_lengths)
    rounding = 100 * np.finfo(dtype).eps  # sums are taken in any order
    np.testing.assert_allclose(out[6], expected[6], rtol=rounding, atol=rounding)
    np.testing.assert_array_equal(np.delete(out, 6, axis=0), np.delete(expected, 6, axis=0))


def _writing_exponentials(of):
    load, store = of.load, of.store
    return lambda i, out, values: store(out, i, exp(load(values, i)))


_over_columns, _over_heads = over_columns(_writing_exponentials), over_heads(_writing_exponentials)


@kernel
def exponentials(values, out, heads):
    if heads:
        _over_heads(np.uint64(values.size), out, values)
    else:
        _over_columns(np.uint64(values.size), out, values)


def made(values, heads=False):
    out = np.full_like(values, 5)
    exponentials(values, out, heads)
    return out


def test_float32_to_three_units_in_the_last_place():
    """Over all that softmax needs."""
    values = np.linspace(-87, 60, 1_000_001).astype(np.float32)
    exact = np.exp(values.astype(np.float64))
    assert np.max(np.abs(made(values) - exact) / exact) < 3 * np.finfo(np.float32).eps


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_special_values(dtype, heads):
    """What is too small is 0, what is too large is not small, and NaN is NaN, wherever in a vector."""
    for shift in range(6):
        values = np.roll(np.array([0.0, -0.0, -1000.0, -math.inf, math.nan, 1000.0], dtype=dtype), shift)
        out = np.roll(made(values, heads), -shift)
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
    one, slope, factor = np.uint64(1), a.dtype.type(SLOPE), a.dtype.type(FACTOR)
    add_dot(length, sums, np.uint64(0), a, one, x, one)
    add_leaky_dot(length, sums, one, a, one, x, one, y, one, slope)
    add_scaled(length, rows, one, a, one, factor)
    add_product(length, rows, one + length, a, one, x, one)
    add_leaky(length, rows, one + np.uint64(2) * length, x, one, y, one, slope, factor)
    add_slopes(length, rows, one + np.uint64(3) * length, a, one, x, one, y, one, slope, factor)


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
    wanted = np.concatenate([[0], FACTOR * a, a * x, FACTOR * leaky, FACTOR * a * slopes, [0]]) + 1
    tolerance = 1e-5 if dtype is np.float32 else 1e-12
    np.testing.assert_allclose(rows, wanted, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(sums, [1 + a @ x, 1 + a @ leaky], rtol=tolerance, atol=10 * tolerance)
