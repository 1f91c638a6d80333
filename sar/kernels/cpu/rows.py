"""Loops over the elements of one row, or of one head of a row, which the kernels of attention run for each edge.

Plain loops, which LLVM turns into vector code. Two things make short loops as fast as long ones: the compiler must know
that arrays do not overlap (`inline_distinct`), and the length must be a variable, because a loop of constant length is
unrolled before it could become vectors.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sar.host import compiler
from sar.host.compiler import inline, inline_distinct, inline_in_order, narrow, prefetch, wide
from sar.kernels import vectors
from sar.kernels.cpu.csr_view import ZERO, Array, CSRView, Index

u64, f32, i32 = np.uint64, np.float32, np.int32

Function = Any  # compiled

# Of the exponential. A float32 of the size of ROUND has no fraction; the two parts of ln 2 have more digits than one.
LEAST, GREATEST, ROUND, LOG2_E = f32(-87), f32(88), f32(1.5 * 2.0**23), f32(1.4426950408889634)
LN2_HIGH, LN2_LOW, BIAS, MANTISSA = f32(0.693359375), f32(-2.12194440054690583e-4), i32(127), i32(23)
C7, C6, C5, C4, C3, C2, C1, C0 = (f32(1 / math.factorial(n)) for n in (7, 6, 5, 4, 3, 2, 1, 0))


@inline_in_order
def _exp_32(x: Any) -> Any:
    """e to the x, a float32, to 3 units in the last place; 0 below LEAST, and that of GREATEST above it."""
    bounded = GREATEST if x > GREATEST else x
    # Adding and taking away ROUND leaves the nearest integer, which also stands in the last bits of the sum.
    rounded = bounded * LOG2_E + ROUND
    power = rounded - ROUND
    rest = (bounded - power * LN2_HIGH) - power * LN2_LOW
    result = ((((((C7 * rest + C6) * rest + C5) * rest + C4) * rest + C3) * rest + C2) * rest + C1) * rest + C0
    result *= np.int32((np.float32(rounded).view(np.int32) + BIAS) << MANTISSA).view(np.float32)
    return np.float32(0) if x < LEAST else result


@inline_distinct
def exponentials(a: Array, length: Index) -> None:
    """a[i] = exp(a[i]) for i < length."""
    if a.itemsize == 4:
        for i in range(length):
            a[i] = _exp_32(np.float32(a[i]))
    else:
        for i in range(length):
            a[i] = np.exp(a[i])


@inline_distinct
def dot(length: Index, a: Array, ia: Index, b: Array, ib: Index) -> Any:
    """The sum of a[ia + i] * b[ib + i] for i < length."""
    total = wide(a.dtype.type(0))
    for i in range(length):
        total += wide(a[ia + i]) * wide(b[ib + i])
    return total


@inline_distinct
def dot_leaky(length: Index, a: Array, ia: Index, x: Array, ix: Index, y: Array, iy: Index, slope: Any) -> Any:
    """The sum of a[ia + i] * leaky_relu(x[ix + i] + y[iy + i]) for i < length."""
    total = a.dtype.type(0)
    for i in range(length):
        raw = wide(x[ix + i]) + wide(y[iy + i])
        total += a[ia + i] * (raw if raw > 0 else raw * slope)
    return total


@inline_in_order
def add_scaled(length: Index, out: Array, o: Index, a: Array, i: Index, factor: Any) -> None:
    """out[o + c] += factor * a[i + c] for c < length."""
    for c in range(length):
        out[o + c] = narrow(wide(out[o + c]) + factor * wide(a[i + c]), out)


def _column_sums(lanes: int, factor: Function, *, whole: bool) -> Function:
    """A function that adds some columns of `row_sums`: one for each lane, or fewer if not `whole`."""
    zeros, load, store, add = vectors.functions(lanes, whole=whole)
    # Edges between asking for their columns and adding them: this hides the latency of rows in memory, but narrow ones.
    lead, line = u64(512 // lanes), u64(compiler.CACHE_LINE // 4)  # of float32; of half precisions each is asked twice

    @inline
    def add_columns(
        csr: CSRView, first: Index, last: Index, rows: Array, i: Index, width: Index, count: Index, out: Array,
        o: Index, fresh: bool, *given: Any,
    ) -> None:  # fmt: skip
        total = zeros(out, count) if fresh else load(out, o, count)
        for p in range(first, last):
            if lanes > 32 and p + lead < u64(csr.other.size):
                for c in range(ZERO, u64(lanes), line):
                    prefetch(rows, u64(csr.other[p + lead]) * width + i + c, ZERO)
            total = add(total, load(rows, u64(csr.other[p]) * width + i, count), factor(p, *given))
        store(out, o, count, total)

    return add_columns


def row_sums(factor: Function) -> Function:
    """A function that adds rows of other ends, each times factor(p, *given), in the order of edges; None stands for 1.

    It is called with (csr, first, last, rows, i, width, length, out, o, fresh, *given), and adds factor * rows[other *
    width + i + c] to out[o + c] for c < length and each edge p from `first` to `last`, which keeps out in registers. If
    `fresh`, out is not read and counts as zeros.
    """
    return _row_sums(inline(factor), 64)


def _row_sums(factor: Function, lanes: int) -> Function:
    """As `row_sums`, with a compiled factor and at most `lanes` columns at a time."""
    add_columns = _column_sums(lanes, factor, whole=True)
    add_rest = _row_sums(factor, lanes // 2) if lanes > 8 else _column_sums(lanes, factor, whole=False)

    @inline
    def add_rows(
        csr: CSRView, first: Index, last: Index, rows: Array, i: Index, width: Index, length: Index, out: Array,
        o: Index, fresh: bool, *given: Any,
    ) -> None:  # fmt: skip
        c = ZERO
        while c + u64(lanes) <= length:
            add_columns(csr, first, last, rows, i + c, width, length, out, o + c, fresh, *given)
            c += u64(lanes)
        if c < length:
            add_rest(csr, first, last, rows, i + c, width, length - c, out, o + c, fresh, *given)

    return add_rows


@inline_distinct
def add_leaky(
    length: Index, out: Array, o: Index, x: Array, ix: Index, y: Array, iy: Index, slope: Any, factor: Any
) -> None:
    """out[o + i] += factor * leaky_relu(x[ix + i] + y[iy + i]) for i < length."""
    for i in range(length):
        raw = wide(x[ix + i]) + wide(y[iy + i])
        out[o + i] += factor * (raw if raw > 0 else raw * slope)


@inline_distinct
def add_slopes(
    length: Index, out: Array, o: Index, a: Array, ia: Index, x: Array, ix: Index, y: Array, iy: Index,
    slope: Any, factor: Any,
) -> None:  # fmt: skip
    """out[o + i] += factor * a[ia + i] * leaky_relu'(x[ix + i] + y[iy + i]) for i < length."""
    for i in range(length):
        out[o + i] += a[ia + i] * (factor if wide(x[ix + i]) + wide(y[iy + i]) > 0 else factor * slope)


@inline
def clear(out: Array, begin: Index, end: Index) -> None:
    """out[begin:end] = 0."""
    for i in range(begin, end):
        out[i] = 0


@inline_distinct
def scale(length: Index, out: Array, o: Index, factor: Any) -> None:
    """out[o + i] *= factor for i < length."""
    for i in range(length):
        out[o + i] *= factor
