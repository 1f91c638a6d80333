"""Sums over runs of consecutive elements, in vector code.

A loop that LLVM vectorises by itself checks its bounds and the overlap of its arrays every time it is entered, which
for the short runs of a row costs more than the run. So these loops are made of straight vector instructions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import types

from sar.kernels._numba import FAST_MATH, declare, inline, typed_intrinsic

Array = Any  # flat
Index = Any  # uint64


class _Lanes(NamedTuple):
    """Functions that take `count` elements at once: straight vector code, without the checks of a loop."""

    length: int
    add_scaled: Any  # (out, io, a, ia, factor): out[io + i] += factor * a[ia + i]
    add_product: Any  # (out, io, a, ia, b, ib): out[io + i] += a[ia + i] * b[ib + i]
    dot: Any  # (a, ia, b, ib): sum of a[ia + i] * b[ib + i]


def _lanes(count: int) -> _Lanes:
    """Vector functions on arrays of one dtype."""

    def load(context: Any, builder: Any, signature: Any, arguments: Any, k: int) -> tuple[Any, Any]:
        """Pointer to, and value of, elements of the array that is argument k, from the index that is the next."""
        array = signature.args[k]
        data = context.make_array(array)(context, builder, arguments[k]).data
        vector = ir.VectorType(context.get_data_type(array.dtype), count)
        pointer = builder.bitcast(builder.gep(data, [arguments[k + 1]]), vector.as_pointer())
        return pointer, builder.load(pointer, align=array.dtype.bitwidth // 8)

    def add(context: Any, builder: Any, signature: Any, arguments: Any, left: Any, right: Any) -> Any:
        """Add left * right to the array that is argument 0."""
        pointer, total = load(context, builder, signature, arguments, 0)
        total = builder.fadd(total, builder.fmul(left, right, flags=FAST_MATH), flags=FAST_MATH)
        builder.store(total, pointer, align=signature.args[0].dtype.bitwidth // 8)
        return context.get_dummy_value()

    @typed_intrinsic  # type: ignore[untyped-decorator]
    def add_scaled(_context: Any, out: Any, io: Any, a: Any, ia: Any, factor: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _, values = load(context, builder, signature, arguments, 2)
            index, undefined = ir.IntType(32), ir.Constant(values.type, ir.Undefined)
            first = builder.insert_element(undefined, arguments[4], index(0))
            everywhere = ir.Constant(ir.VectorType(index, count), [0] * count)
            return add(
                context, builder, signature, arguments, builder.shuffle_vector(first, undefined, everywhere), values
            )

        return types.void(out, io, a, ia, a.dtype), generate

    @typed_intrinsic  # type: ignore[untyped-decorator]
    def add_product(_context: Any, out: Any, io: Any, a: Any, ia: Any, b: Any, ib: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            left, right = (load(context, builder, signature, arguments, k)[1] for k in (2, 4))
            return add(context, builder, signature, arguments, left, right)

        return types.void(out, io, a, ia, b, ib), generate

    @typed_intrinsic  # type: ignore[untyped-decorator]
    def dot(_context: Any, a: Any, ia: Any, b: Any, ib: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            left, right = (load(context, builder, signature, arguments, k)[1] for k in (0, 2))
            product = builder.fmul(left, right, flags=FAST_MATH)
            element = product.type.element
            kind = ir.FunctionType(element, [element, product.type])
            name = f"llvm.vector.reduce.fadd.v{count}f{signature.args[0].dtype.bitwidth}"
            reduce = declare(builder.module, kind, name)
            return builder.call(reduce, [ir.Constant(element, 0.0), product], fastmath=FAST_MATH)

        return a.dtype(a, ia, b, ib), generate

    return _Lanes(count, add_scaled, add_product, dot)


_wide, _narrow = _lanes(32), _lanes(8)
_add_scaled_wide, _add_product_wide, _dot_wide = _wide[1:]
_add_scaled_narrow, _add_product_narrow, _dot_narrow = _narrow[1:]
WIDE, NARROW = np.uint64(_wide.length), np.uint64(_narrow.length)


@inline
def add_scaled(out: Array, io: Index, a: Array, ia: Index, factor: Any, length: Index) -> None:
    """out[io + i] += factor * a[ia + i] for i < length."""
    i = np.uint64(0)
    while i + WIDE <= length:
        _add_scaled_wide(out, io + i, a, ia + i, factor)
        i += WIDE
    while i + NARROW <= length:
        _add_scaled_narrow(out, io + i, a, ia + i, factor)
        i += NARROW
    while i < length:
        out[io + i] += factor * a[ia + i]
        i += np.uint64(1)


@inline
def add_product(out: Array, io: Index, a: Array, ia: Index, b: Array, ib: Index, length: Index) -> None:
    """out[io + i] += a[ia + i] * b[ib + i] for i < length."""
    i = np.uint64(0)
    while i + WIDE <= length:
        _add_product_wide(out, io + i, a, ia + i, b, ib + i)
        i += WIDE
    while i + NARROW <= length:
        _add_product_narrow(out, io + i, a, ia + i, b, ib + i)
        i += NARROW
    while i < length:
        out[io + i] += a[ia + i] * b[ib + i]
        i += np.uint64(1)


@inline
def dot(a: Array, ia: Index, b: Array, ib: Index, length: Index) -> Any:
    """The sum of a[ia + i] * b[ib + i] for i < length."""
    total = a.dtype.type(0)
    i = np.uint64(0)
    while i + WIDE <= length:
        total += _dot_wide(a, ia + i, b, ib + i)
        i += WIDE
    while i + NARROW <= length:
        total += _dot_narrow(a, ia + i, b, ib + i)
        i += NARROW
    while i < length:
        total += a[ia + i] * b[ib + i]
        i += np.uint64(1)
    return total


@typed_intrinsic  # type: ignore[untyped-decorator]
def exp(_context: Any, x: Any) -> Any:
    """e to the x: of float32 to 3 units in the last place, at least e**-87, as arithmetic that LLVM can vectorise."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (kind,), (value,) = signature.args, arguments
        number = context.get_data_type(kind)
        if kind != types.float32:
            return builder.call(declare(builder.module, ir.FunctionType(number, [number]), "llvm.exp.f64"), [value])
        integer = ir.IntType(32)
        least = number(-87.0)
        value = builder.select(builder.fcmp_ordered("<", value, least), least, value)
        floor = declare(builder.module, ir.FunctionType(number, [number]), "llvm.floor.f32")
        halves = builder.fadd(builder.fmul(value, number(1.4426950408889634)), number(0.5))
        power = builder.call(floor, [halves])
        # Without fast-math flags: the two steps take ln 2 away in more digits than one number has.
        rest = builder.fsub(value, builder.fmul(power, number(0.693359375)))
        rest = builder.fsub(rest, builder.fmul(power, number(-2.12194440054690583e-4)))
        result = number(1 / 5040)
        for divisor in (720, 120, 24, 6, 2, 1, 1):
            result = builder.fadd(builder.fmul(result, rest, flags=FAST_MATH), number(1 / divisor), flags=FAST_MATH)
        saturate = declare(builder.module, ir.FunctionType(integer, [number]), "llvm.fptosi.sat.i32.f32")
        exponent = builder.shl(builder.add(builder.call(saturate, [power]), integer(127)), integer(23))
        return builder.fmul(result, builder.bitcast(exponent, number))

    return x(x), generate
