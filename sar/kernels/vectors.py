"""Vectors of numbers for compiled loops: several columns of a row that stay in registers while a loop adds to them.

LLVM's own vectorizer works on loops over columns, which load and store the row of results at every edge. A value of
type `Vector` lives across a loop over edges instead. LLVM divides it into registers of the processor's width, so the
same code serves every width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.extending import register_model

from sar.host.compiler import intrinsic

_WORD = ir.IntType(32)


class Vector(types.Type):
    """The type of `lanes` numbers, float32 or float64."""

    def __init__(self, kind: Any, lanes: int) -> None:
        self.kind, self.lanes = kind, lanes
        super().__init__(f"Vector({kind}, {lanes})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        number = ir.DoubleType() if vector.kind == types.float64 else ir.FloatType()
        super().__init__(manager, vector, ir.VectorType(number, vector.lanes))


class Functions(NamedTuple):
    """Functions of vectors of one size."""

    zeros: Any
    """zeros(array, count): what `load` makes of an array of zeros."""

    load: Any
    """load(array, at, count): array[at : at + count]. Half precisions (see `wide`) become float32."""

    store: Any
    """store(array, at, count, vector): writes the first `count` numbers, to an array of float32 or float64."""

    add_scaled: Any
    """add_scaled(total, vector, factor): total + factor * vector, rounded once if the processor can. None: 1."""


def functions(lanes: int, *, whole: bool) -> Functions:
    """Functions of vectors of `lanes` numbers. whole: `count` is that, and not read; at most that, if False."""

    def vector_of(array: Any) -> Vector:
        return Vector(types.float64 if array.dtype == types.float64 else types.float32, lanes)

    @intrinsic
    def zeros(_context: Any, array: Any, count: Any) -> Any:
        vector = vector_of(array)
        return vector(array, count), lambda context, *_: ir.Constant(context.get_value_type(vector), None)

    @intrinsic
    def load(_context: Any, array: Any, at: Any, count: Any) -> Any:
        vector = vector_of(array)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer, kind = _place(context, builder, signature.args[0], arguments[0], arguments[1])
            if whole:
                values = builder.load(pointer, align=kind.elements_size)
            else:
                mask = _first(builder, arguments[2])
                values = _call_masked(builder, "load", kind, kind, pointer, mask, ir.Constant(kind, None))
            result = context.get_value_type(vector)
            if array.dtype == types.uint16:  # bfloat16: the first half of a float32
                words = ir.VectorType(_WORD, lanes)
                return builder.bitcast(
                    builder.shl(builder.zext(values, words), ir.Constant(words, [16] * lanes)), result
                )
            if array.dtype == types.int16:
                return builder.fpext(builder.bitcast(values, ir.VectorType(ir.HalfType(), lanes)), result)
            return values

        return vector(array, at, count), generate

    @intrinsic
    def store(_context: Any, array: Any, at: Any, count: Any, vector: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer, kind = _place(context, builder, signature.args[0], arguments[0], arguments[1])
            if whole:
                builder.store(arguments[3], pointer, align=kind.elements_size)
            else:
                mask = _first(builder, arguments[2])
                _call_masked(builder, "store", ir.VoidType(), kind, arguments[3], pointer, mask)
            return context.get_dummy_value()

        return types.void(array, at, count, vector), generate

    @intrinsic
    def add_scaled(_context: Any, total: Any, vector: Any, factor: Any) -> Any:
        def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            before, value, by = arguments
            product = value if factor == types.none else builder.fmul(value, _spread(builder, by), flags=("contract",))
            return builder.fadd(before, product, flags=("contract",))

        return total(total, vector, factor if factor == types.none else vector.kind), generate

    def _place(context: Any, builder: Any, array: Any, value: Any, at: Any) -> Any:
        """A pointer to `lanes` elements of an array, and their type."""
        kind = ir.VectorType(context.get_data_type(array.dtype), lanes)
        kind.elements_size = array.dtype.bitwidth // 8
        data = context.make_array(array)(context, builder, value).data
        return builder.bitcast(builder.gep(data, [at]), kind.as_pointer()), kind

    def _spread(builder: Any, value: Any) -> Any:
        """A vector that has this value in each lane."""
        empty = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
        zeros = ir.Constant(ir.VectorType(_WORD, lanes), [0] * lanes)
        return builder.shuffle_vector(builder.insert_element(empty, value, _WORD(0)), empty, zeros)

    def _first(builder: Any, count: Any) -> Any:
        """A mask of the first `count` lanes."""
        numbers = ir.Constant(ir.VectorType(_WORD, lanes), list(range(lanes)))
        return builder.icmp_unsigned("<", numbers, _spread(builder, builder.trunc(count, _WORD)))

    def _call_masked(builder: Any, name: str, result: Any, kind: Any, *arguments: Any) -> Any:
        """LLVM's masked load or store; the alignment is the argument after the pointer."""
        place = 1 + next(i for i, argument in enumerate(arguments) if isinstance(argument.type, ir.PointerType))
        given = [*arguments[:place], _WORD(kind.elements_size), *arguments[place:]]
        function = ir.FunctionType(result, [argument.type for argument in given])
        short = {2: "i16", 4: "f32", 8: "f64"}[kind.elements_size]
        callee = cgutils.get_or_insert_function(builder.module, function, f"llvm.masked.{name}.v{lanes}{short}.p0")
        return builder.call(callee, given)

    return Functions(zeros, load, store, add_scaled)
