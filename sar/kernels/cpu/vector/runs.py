"""Loops over runs of consecutive elements in vector code: any step, and the sums that kernels are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sar.kernels.cpu.compile import inline
from sar.kernels.cpu.vector.vector_type import Lanes, lanes, sum_of, where_positive

Array = Any  # flat
Index = Any  # uint64
Run = Any  # a compiled function

u64 = np.uint64
ZERO, ONE, FOUR, NARROW, WIDE = u64(0), u64(1), u64(4), u64(8), u64(32)


def over_columns(make: Callable[[Lanes], Run]) -> Run:
    """A function run(length, *operands) that calls make(lanes)(i, *operands) for all i < length, a vector at a time."""
    wide, narrow, single = (inline(make(lanes(int(count)))) for count in (WIDE, NARROW, ONE))

    # The three loops stand in one function, because each function of so many arguments takes long to compile.
    @inline
    def run(length: Index, *operands: Any) -> None:
        i = ZERO
        while i + WIDE <= length:
            wide(i, *operands)
            i += WIDE
        while i + NARROW <= length:
            narrow(i, *operands)
            i += NARROW
        while i + ONE <= length:
            single(i, *operands)
            i += ONE

    return run


def over_heads(make: Callable[[Lanes], Run]) -> Run:
    """As `over_columns`, for the short runs that heads are."""
    four, single = (inline(make(lanes(int(count)))) for count in (FOUR, ONE))

    @inline
    def run(length: Index, *operands: Any) -> None:
        i = ZERO
        while i + FOUR <= length:
            four(i, *operands)
            i += FOUR
        while i + ONE <= length:
            single(i, *operands)
            i += ONE

    return run


def _adding(of: Lanes) -> Run:
    load, store = of.load, of.store
    return inline(lambda out, i, values: store(out, i, load(out, i) + values))


@over_columns
def add_scaled(of: Lanes) -> Run:
    """out[io + i] += factor * a[ia + i] for i < length: (length, out, io, a, ia, factor)."""
    load, everywhere, add = of.load, of.everywhere, _adding(of)
    return lambda i, out, io, a, ia, factor: add(out, io + i, load(a, ia + i) * everywhere(factor))


@over_columns
def add_product(of: Lanes) -> Run:
    """out[io + i] += a[ia + i] * b[ib + i] for i < length: (length, out, io, a, ia, b, ib)."""
    load, add = of.load, _adding(of)
    return lambda i, out, io, a, ia, b, ib: add(out, io + i, load(a, ia + i) * load(b, ib + i))


@over_columns
def add_dot(of: Lanes) -> Run:
    """out[io] += sum of a[ia + i] * b[ib + i] for i < length: (length, out, io, a, ia, b, ib)."""
    load = of.load

    def run(i: Index, out: Array, io: Index, a: Array, ia: Index, b: Array, ib: Index) -> None:
        out[io] += sum_of(load(a, ia + i) * load(b, ib + i))

    return run


def _leaky(of: Lanes) -> Run:
    everywhere = of.everywhere
    return inline(lambda values, slope: where_positive(values, values, values * everywhere(slope)))


@over_columns
def add_leaky_dot(of: Lanes) -> Run:
    """out[io] += sum of a[ia + i] * leaky_relu(x[ix + i] + y[iy + i]), as `add_dot`; then the slope below 0."""
    load, leaky = of.load, _leaky(of)

    def run(
        i: Index, out: Array, io: Index, a: Array, ia: Index, x: Array, ix: Index, y: Array, iy: Index, slope: Any
    ) -> None:
        out[io] += sum_of(load(a, ia + i) * leaky(load(x, ix + i) + load(y, iy + i), slope))

    return run


@over_columns
def add_leaky(of: Lanes) -> Run:
    """out[io + i] += factor * leaky_relu(x[ix + i] + y[iy + i]): (length, out, io, x, ix, y, iy, slope, factor)."""
    load, everywhere, add, leaky = of.load, of.everywhere, _adding(of), _leaky(of)

    def run(i: Index, out: Array, io: Index, x: Array, ix: Index, y: Array, iy: Index, slope: Any, factor: Any) -> None:
        add(out, io + i, leaky(load(x, ix + i) + load(y, iy + i), slope) * everywhere(factor))

    return run


@over_columns
def add_slopes(of: Lanes) -> Run:
    """out[io + i] += factor * a[ia + i] * leaky_relu'(x[ix + i] + y[iy + i]), as `add_leaky`, with a, ia before x."""
    load, everywhere, add = of.load, of.everywhere, _adding(of)

    def run(
        i: Index,
        out: Array,
        io: Index,
        a: Array,
        ia: Index,
        x: Array,
        ix: Index,
        y: Array,
        iy: Index,
        slope: Any,
        factor: Any,
    ) -> None:
        slopes = where_positive(load(x, ix + i) + load(y, iy + i), everywhere(factor), everywhere(factor * slope))
        add(out, io + i, load(a, ia + i) * slopes)

    return run
