"""Functions that emit LLVM's instructions: what all of them are made with, and those on single numbers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

CACHE_LINE = 64  # bytes

typed_intrinsic: Any = intrinsic
declare: Any = cgutils.get_or_insert_function


def prefetch_line(builder: Any, pointer: Any) -> None:
    """Emit code that asks for the cache line of an i8 pointer, for reading; harmless where there is no memory."""
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
    function = declare(builder.module, kind, "llvm.prefetch.p0")
    read, all_levels, data_cache = number(0), number(3), number(1)
    builder.call(function, [pointer, read, all_levels, data_cache])


def data_of(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    """The pointer to the elements of an array of Numba's, or of a `Flat` one."""
    if isinstance(kind, types.Array):
        return context.make_array(kind)(context, builder, array).data
    return builder.extract_value(array, 0)


@typed_intrinsic  # type: ignore[untyped-decorator]
def prefetch(_context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of array[index], for reading; harmless where the index is out of range."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = data_of(context, builder, signature.args[0], arguments[0])
        prefetch_line(builder, builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(array, index), generate


@typed_intrinsic  # type: ignore[untyped-decorator]
def line_length(_context: Any, array: Any) -> Any:
    """How many elements of an array a cache line holds, as a constant: a division costs more than what it serves."""

    def generate(_context: Any, _builder: Any, _signature: Any, _arguments: Any) -> Any:
        return ir.IntType(64)(CACHE_LINE * 8 // array.dtype.bitwidth)

    return types.uint64(array), generate
