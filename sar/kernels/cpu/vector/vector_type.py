"""Vectors as values in compiled loops: a type for Numba that is one of LLVM's vector types.

A loop that LLVM vectorises by itself checks its bounds and the overlap of its arrays every time it is entered, which
for the short runs of a row costs more than the run. Loops over these vectors are straight vector code, and what they
add up stays in registers.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import types
from numba.extending import lower_builtin, models, register_model, type_callable

from sar.kernels.cpu.compile import FAST_MATH
from sar.kernels.cpu.vector.intrinsics import CACHE_LINE, data_of, declare, prefetch_line, typed_intrinsic

_registered: Any = register_model
_typed: Any = type_callable
_lowered: Any = lower_builtin


class Vector(types.Type):
    """`count` numbers of one dtype."""

    def __init__(self, dtype: Any, count: int) -> None:
        super().__init__(f"vector({dtype}, {count})")
        self.dtype, self.count = dtype, count


@_registered(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, ir.VectorType(manager.lookup(kind.dtype).get_value_type(), kind.count))


class Lanes(NamedTuple):
    """Functions that make and store vectors of one length."""

    length: int
    load: Any  # (array, index) -> vector: array[index + i]
    store: Any  # (array, index, vector): array[index + i] = vector[i]
    everywhere: Any  # (number) -> vector: number
    prefetch: Any  # (array, index): ask for the cache lines of array[index + i]


def lanes(count: int) -> Lanes:
    """Functions for vectors of `count` elements."""

    def address(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """Pointer to the vector in the array that is the first argument, at the index that is the second."""
        array = signature.args[0]
        data = data_of(context, builder, array, arguments[0])
        kind = ir.VectorType(context.get_data_type(array.dtype), count)
        return builder.bitcast(builder.gep(data, [arguments[1]]), kind.as_pointer())

    @typed_intrinsic  # type: ignore[untyped-decorator]
    def load(_context: Any, array: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.load(address(context, builder, signature, arguments), align=array.dtype.bitwidth // 8)

        return Vector(array.dtype, count)(array, index), generate

    @typed_intrinsic  # type: ignore[untyped-decorator]
    def store(_context: Any, array: Any, index: Any, vector: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = address(context, builder, signature, arguments)
            builder.store(arguments[2], pointer, align=array.dtype.bitwidth // 8)
            return context.get_dummy_value()

        return types.void(array, index, vector), generate

    @typed_intrinsic  # type: ignore[untyped-decorator]
    def everywhere(_context: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            vector = context.get_value_type(signature.return_type)
            index, undefined = ir.IntType(32), ir.Constant(vector, ir.Undefined)
            first = builder.insert_element(undefined, arguments[0], index(0))
            return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(index, count), [0] * count))

        return Vector(number, count)(number), generate

    @typed_intrinsic  # type: ignore[untyped-decorator]
    def prefetch(_context: Any, array: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.bitcast(address(context, builder, signature, arguments), ir.IntType(8).as_pointer())
            for begin in range(0, count * array.dtype.bitwidth // 8, CACHE_LINE):
                prefetch_line(builder, builder.gep(pointer, [ir.IntType(64)(begin)]))
            return context.get_dummy_value()

        return types.void(array, index), generate

    return Lanes(count, load, store, everywhere, prefetch)


def _operation(function: Any, name: str) -> None:
    """Have Numba compile function(vector, vector) as an instruction of the IR builder, without a function around it."""

    @_typed(function)  # type: ignore[untyped-decorator]
    def _choose(_context: Any) -> Any:
        return lambda left, right: left if isinstance(left, Vector) and left == right else None

    @_lowered(function, Vector, Vector)  # type: ignore[untyped-decorator]
    def _generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return getattr(builder, name)(*arguments, flags=FAST_MATH)


for _function, _name in (operator.add, "fadd"), (operator.iadd, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul"):
    _operation(_function, _name)


@typed_intrinsic  # type: ignore[untyped-decorator]
def larger(_context: Any, left: Any, right: Any) -> Any:
    """The larger of two vectors' elements; of a NaN and a number the number.

    Not by comparison: LLVM makes masked stores of that, and what was stored with a mask cannot be loaded soon.
    """

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = arguments[0].type
        name = f"llvm.maxnum.v{left.count}f{left.dtype.bitwidth}"
        return builder.call(declare(builder.module, ir.FunctionType(kind, [kind, kind]), name), arguments)

    return left(left, right), generate


@typed_intrinsic  # type: ignore[untyped-decorator]
def where_positive(_context: Any, vector: Any, left: Any, right: Any) -> Any:
    """left where the elements of a vector are above 0, else right."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        value, left, right = arguments
        return builder.select(builder.fcmp_ordered(">", value, ir.Constant(value.type, None)), left, right)

    return left(vector, left, right), generate


@typed_intrinsic  # type: ignore[untyped-decorator]
def sum_of(_context: Any, vector: Any) -> Any:
    """The sum of a vector's elements: of its halves, of their sum's halves, and so on."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        # Not by `llvm.vector.reduce.fadd`, which LLVM replaces so late that its order depends on the code around it.
        [value] = arguments
        index, undefined, width = ir.IntType(32), ir.Constant(value.type, ir.Undefined), vector.count
        while width > 1:
            width //= 2
            places = [index(width + i if i < width else i) for i in range(vector.count)]  # the others count no more
            half = builder.shuffle_vector(value, undefined, ir.Constant(ir.VectorType(index, vector.count), places))
            value = builder.fadd(value, half, flags=FAST_MATH)
        return builder.extract_element(value, index(0))

    return vector.dtype(vector), generate
