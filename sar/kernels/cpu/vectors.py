"""Sums over runs of consecutive elements, and the exponential, in vector code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from sar.kernels.cpu.intrinsics import FAST_MATH, declare, inline, typed_intrinsic
from sar.kernels.cpu.vector_type import Lanes, lanes, sum_of, where_positive

Array = Any  # flat
Index = Any  # uint64
Run = Any  # a compiled function

u64 = np.uint64
IN_ORDER = ("contract",)  # Numba gives instructions without flags all those of FAST_MATH, which may reorder them
ROUND = 1.5 * 2.0**23  # a float32 of this size has no fraction
ZERO, ONE, FOUR, NARROW, WIDE = u64(0), u64(1), u64(4), u64(8), u64(32)


def _while_they_fit(make: Callable[[Lanes], Run], count: Index) -> Run:
    """A function run(i, length, *operands) that calls make(lanes)(i, *operands) from i on; returns where it ends."""
    step = inline(make(lanes(int(count))))

    @inline
    def run(i: Index, length: Index, *operands: Any) -> Any:
        while i + count <= length:
            step(i, *operands)
            i += count
        return i

    return run


def over_columns(make: Callable[[Lanes], Run]) -> Run:
    """A function run(length, *operands) that calls make(lanes)(i, *operands) for all i < length, a vector at a time."""
    wide, narrow, single = (_while_they_fit(make, count) for count in (WIDE, NARROW, ONE))

    @inline
    def run(length: Index, *operands: Any) -> None:
        i = wide(ZERO, length, *operands)
        i = narrow(i, length, *operands)
        single(i, length, *operands)

    return run


def over_heads(make: Callable[[Lanes], Run]) -> Run:
    """As `over_columns`, for the short runs that heads are."""
    four, single = (_while_they_fit(make, count) for count in (FOUR, ONE))

    @inline
    def run(length: Index, *operands: Any) -> None:
        single(four(ZERO, length, *operands), length, *operands)

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


@typed_intrinsic  # type: ignore[untyped-decorator]
def exp(_context: Any, x: Any) -> Any:
    """e to the x, of a vector; of float32 to 3 units in the last place, 0 below -87, and that of 88 above it."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        (value,) = arguments
        kind = value.type

        def constant(number: float, kind: Any = kind) -> Any:
            return ir.Constant(kind, [number] * x.count)

        def call(name: str, *arguments: Any) -> Any:
            name = f"llvm.{name}.v{x.count}f{x.dtype.bitwidth}"
            return builder.call(
                declare(builder.module, ir.FunctionType(kind, [kind] * len(arguments)), name), arguments
            )

        if x.dtype != types.float32:
            return call("exp", value)
        # Adding and taking away ROUND leaves the nearest integer, which also stands in the last bits of the sum. The
        # instructions that convert numbers check their range, one element after the other.
        bounded = builder.select(builder.fcmp_ordered(">", value, constant(88.0)), constant(88.0), value)
        scaled = builder.fmul(bounded, constant(1.4426950408889634), flags=IN_ORDER)
        sum_ = builder.fadd(scaled, constant(ROUND), flags=IN_ORDER)
        power = builder.fsub(sum_, constant(ROUND), flags=IN_ORDER)
        # Two steps take ln 2 away in more digits than one number has.
        rest = builder.fsub(bounded, builder.fmul(power, constant(0.693359375), flags=IN_ORDER), flags=IN_ORDER)
        low = builder.fmul(power, constant(-2.12194440054690583e-4), flags=IN_ORDER)
        rest = builder.fsub(rest, low, flags=IN_ORDER)
        result = constant(1 / 5040)
        for divisor in (720, 120, 24, 6, 2, 1, 1):
            result = builder.fmul(result, rest, flags=FAST_MATH)
            result = builder.fadd(result, constant(1 / divisor), flags=FAST_MATH)
        integers = ir.VectorType(ir.IntType(32), x.count)
        exponent = builder.add(builder.bitcast(sum_, integers), constant(127, integers))
        exponent = builder.shl(exponent, constant(23, integers))
        result = builder.fmul(result, builder.bitcast(exponent, kind))
        return builder.select(builder.fcmp_ordered("<", value, constant(-87.0)), constant(0.0), result)

    return x(x), generate
