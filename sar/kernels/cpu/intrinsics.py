"""The ways in which sar compiles functions with Numba."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

CACHE_LINE = 64  # bytes

F = TypeVar("F", bound=Callable[..., Any])

# Not `fastmath=True`: its "nnan" and "ninf" allow to drop the comparisons that NaN and infinities depend on.
FAST_MATH = ("contract", "reassoc", "nsz", "arcp")

_OPTIONS = {
    "nogil": True,
    "error_model": "numpy",  # division by zero gives inf or NaN
    "fastmath": set(FAST_MATH),
    # No reference counting: the loops only borrow their arrays, and an atomic count per edge is slower than the edge.
    "_nrt": False,
}

_njit: Any = numba.njit
typed_intrinsic: Any = intrinsic
declare: Any = cgutils.get_or_insert_function


def kernel(function: F) -> F:
    """Compile an entry point and keep its code on disk.

    Numba keeps code beside the source, else in the user's cache directory; where it can write neither, nothing is kept.
    It looks for changes only in the file of the entry point, but keeps code under the function's qualified name, which
    therefore gets a digest of all files that the code may come from.
    """
    function.__qualname__ = f"{function.__name__}_{_sources_digest()}"
    try:
        compiled: F = _njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:
        compiled = _njit(**_OPTIONS)(function)
    return compiled


def inline(function: F) -> F:
    """Compile a helper into each kernel that calls it."""
    compiled: F = _njit(forceinline=True, **_OPTIONS)(function)
    return compiled


@cache
def _sources_digest() -> str:
    digest = hashlib.blake2b(digest_size=4)
    here = Path(__file__).parent
    for path in (*sorted(here.glob("*.py")), here.parent / "attention_operands.py"):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def prefetch_line(builder: Any, pointer: Any) -> None:
    """Emit code that asks for the cache line of an i8 pointer, for reading; harmless where there is no memory."""
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
    function = declare(builder.module, kind, "llvm.prefetch.p0")
    read, all_levels, data_cache = number(0), number(3), number(1)
    builder.call(function, [pointer, read, all_levels, data_cache])


@typed_intrinsic  # type: ignore[untyped-decorator]
def prefetch(_context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of array[index], for reading; harmless where the index is out of range."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        prefetch_line(builder, builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(array, index), generate


@typed_intrinsic  # type: ignore[untyped-decorator]
def line_length(_context: Any, array: Any) -> Any:
    """How many elements of an array a cache line holds, as a constant: a division costs more than what it serves."""

    def generate(_context: Any, _builder: Any, _signature: Any, _arguments: Any) -> Any:
        return ir.IntType(64)(CACHE_LINE * 8 // array.dtype.bitwidth)

    return types.uint64(array), generate
