"""How compiled kernels are made and kept. Only this file and `kernels/vectors.py` touch the insides of Numba and LLVM.

`docs/kernels.md` says what breaks with a new Numba, and how to look at the machine code.

[Note: one module]
Numba would make machine code of every helper, with two wrappers for callers that it does not have, and optimise it with
all that it calls, again at each level. Three quarters of the time went there. Here a helper is no more than LLVM's
code as Numba emits it; the entry point takes that of all its helpers, and all of it is optimised once.

[Note: compiled code on disk]
A kernel is compiled at its first call with operands of some dtypes. A file's name holds a digest of the sources, so
every environment with the same sources, Numba and processor finds it. Workers that compile the same kernel at the same
time write the same code, each to a file of its own, which is renamed in one step.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import time
import uuid
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numba
import numba.extending
from llvmlite import ir
from numba.core import cgutils
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, CompileResult, DefaultPassBuilder
from numba.core.registry import cpu_target
from numba.core.serialize import dumps
from numba.core.types import Integer, float32, int16, uint16, void

from sar.logging_setup import logger

F = TypeVar("F", bound=Callable[..., Any])
Decorator = Callable[[Callable[..., Any]], Any]

intrinsic: Decorator = numba.extending.intrinsic
"""The decorated function has an additional first argument, which callers do not pass."""

CACHE_LINE = 64  # bytes
DIGEST_BYTES = 16  # of a file with compiled code
NOTED_SECONDS = 0.5  # faster compilations are not logged

PACKAGE = Path(__file__).parents[1]
SHARED_SOURCES = [Path(__file__), PACKAGE / "tensors" / "splitmix.py"]
SHARED_SOURCES += [*(PACKAGE / "kernels").glob("*.py"), *(PACKAGE / "kernels" / "cpu").glob("*.py")]

# Not `fastmath=True`: its "nnan" and "ninf" allow to drop the comparisons that NaN and infinities depend on.
FAST_MATH = {"contract", "reassoc", "nsz", "arcp"}

_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",  # division by zero gives inf or NaN
    "fastmath": FAST_MATH,
    # No reference counting: the loops only borrow their arrays, and an atomic count per edge is slower than the edge.
    "_nrt": False,
    "no_cfunc_wrapper": True,
}


class _Part(JITCodeLibrary):
    """The code of a helper: no machine code, hence no address and no environment."""

    def finalize(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0

    @property
    def codegen(self) -> Any:
        return self  # Numba only calls `set_env`

    def set_env(self, name: str, env: Any) -> None:
        pass


class _Whole(JITCodeLibrary):
    """The code of an entry point, and of the helpers that it calls."""

    def finalize(self) -> None:
        order: dict[Any, None] = {}  # callees first

        def visit(library: Any) -> None:
            if library not in order:
                for called in library._linking_libraries if isinstance(library, _Part | _Whole) else ():
                    visit(called)
                order[library] = None

        visit(self)
        # Callers first: LLVM leaves out functions that nothing linked so far refers to.
        self._linking_libraries = list(order)[-2::-1]
        super().finalize()


def _compiler(library: Any, *, noalias: bool = False) -> Any:
    """Numba's compiler, with code of this kind; `noalias`: no array that is written to overlaps another argument."""

    class Compiler(CompilerBase):
        def define_pipelines(self) -> list[Any]:
            state = self.state
            state.library = library(state.targetctx.codegen(), state.func_id.func_qualname)
            state.library.enable_object_caching()
            state.flags.noalias = noalias
            return [DefaultPassBuilder.define_nopython_pipeline(state)]

    return Compiler


def compile_cached(function: F, **options: Any) -> F:
    """Compile a function with Numba's options, and keep its code on disk, in `code_folder`."""
    compiled, folder = numba.njit(**options)(function), code_folder()
    if folder is not None:
        compiled._cache = _CodeCache(function, folder)
    return compiled


def kernel(function: F) -> F:
    """Compile an entry point and keep its code on disk."""
    return compile_cached(function, **_OPTIONS, pipeline_class=_compiler(_Whole))


_HELPERS = _OPTIONS | {"forceinline": True, "no_cpython_wrapper": True}
_IN_ORDER = _HELPERS | {"fastmath": {"contract"}}

inline: Decorator = numba.njit(**_HELPERS, pipeline_class=_compiler(_Part))
"""Compiles a helper into each kernel that calls it."""

inline_distinct: Decorator = numba.njit(**_HELPERS, pipeline_class=_compiler(_Part, noalias=True))
"""As `inline`, for helpers whose output arrays do not overlap other arguments.

A short loop then need not check for overlaps each time it is entered, which costs as much as a row.
"""

inline_in_order: Decorator = numba.njit(**_IN_ORDER, pipeline_class=_compiler(_Part, noalias=True))
"""As `inline_distinct`, with sums and products taken in the order in which they are written."""


@intrinsic
def prefetch(_context: Any, array: Any, index: Any, line: Any) -> Any:
    """Ask for a cache line, for reading: that of array[index], or `line` lines after it; harmless out of range."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        start = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        pointer = builder.gep(start, [builder.mul(arguments[2], ir.IntType(64)(CACHE_LINE))])
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        read, all_levels, data_cache = number(0), number(3), number(1)
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [pointer, read, all_levels, data_cache])
        return context.get_dummy_value()

    return void(array, index, line), generate


@intrinsic
def wide(_context: Any, element: Any) -> Any:
    """An element of an array to compute with: float32 of the bits of bfloat16 (uint16) and float16 (int16)."""

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        [bits], [kind] = arguments, signature.args
        if kind == uint16:
            word = ir.IntType(32)
            return builder.bitcast(builder.shl(builder.zext(bits, word), word(16)), ir.FloatType())
        return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType()) if kind == int16 else bits

    return (float32 if isinstance(element, Integer) else element)(element), generate


@intrinsic
def narrow(_context: Any, number: Any, array: Any) -> Any:
    """A number as an element of the array, the inverse of `wide`: rounded to nearest, ties to even; NaN stays NaN."""

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, kind, short, word = arguments[0], signature.return_type, ir.IntType(16), ir.IntType(32)
        if kind == int16:
            return builder.bitcast(builder.fptrunc(value, ir.HalfType()), short)
        if kind != uint16:
            return value
        bits = builder.bitcast(value, word)
        odd = builder.and_(builder.lshr(bits, word(16)), word(1))
        rounded = builder.add(bits, builder.add(odd, word(0x7FFF)))
        quiet = builder.or_(bits, word(0x400000))
        kept = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
        return builder.trunc(builder.lshr(kept, word(16)), short)

    return (array.dtype if isinstance(array.dtype, Integer) else number)(number, array), generate


def converts_float16() -> bool:
    """Whether the target processor converts float16; otherwise LLVM calls functions that do not exist."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return "+f16c" in features.split(",") or triple.startswith("aarch64")


# -- compiled code on disk


@cache
def code_folder() -> Path | None:
    """The first folder that can be written: below `NUMBA_CACHE_DIR`, the user's cache directory, this package's own.

    None if there is none.
    """
    given, user = os.environ.get("NUMBA_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # no home
        for parent in (given, user or Path.home() / ".cache", PACKAGE / "__pycache__"):
            if parent:
                folder = Path(parent) / f"sar-kernels-numba-{version('numba')}"
                with contextlib.suppress(OSError):
                    folder.mkdir(parents=True, exist_ok=True)
                    if os.access(folder, os.W_OK | os.X_OK):
                        return folder
    logger.info("Found no folder for compiled code, which is made anew in every run; set NUMBA_CACHE_DIR to one")
    return None


@cache
def digest_of_sources(folder: Path) -> str:
    """A digest of the files that code of a folder may come from: its own, and those with helpers for all kernels."""
    digest = hashlib.blake2b(digest_size=4)
    for file in sorted({*folder.rglob("*.py"), *SHARED_SOURCES}):
        digest.update(file.read_bytes())
    return digest.hexdigest()


class _CodeCache:
    """The code of one function on disk, with the methods that Numba calls: see [Note: compiled code on disk].

    A file for each signature begins with a digest: a damaged one, as after a power cut, counts as none. Numba's own
    files are unpickled unchecked, and an index that is lost lets it take one signature's code for another.
    """

    def __init__(self, function: Callable[..., Any], folder: Path) -> None:
        source = Path(function.__code__.co_filename)
        self.cache_path = str(folder)
        self.name = f"{source.stem}.{function.__name__}-{digest_of_sources(source.parent)}"
        self._bytecode = function.__code__.co_code
        self._began = 0.0

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The code for a signature. If it is None, this process compiles it now, and ends with `save_overload`."""
        self._began = time.monotonic()
        target.refresh()
        key = self.key(signature, target.codegen())
        with contextlib.suppress(OSError):
            content = self._file(key).read_bytes()
            if content[:DIGEST_BYTES] == _digest(content[DIGEST_BYTES:]):
                saved, code = pickle.loads(content[DIGEST_BYTES:])
                return CompileResult._rebuild(target, *code) if saved == key else None
        return None

    def save_overload(self, signature: Any, code: CompileResult) -> None:
        """Rename a complete file, which is safe if other processes do the same."""
        key = self.key(signature, code.codegen)
        content, file = dumps((key, code._reduce())), self._file(key)
        partial = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
        with contextlib.suppress(OSError):  # of a full disk: this process has its code
            try:
                partial.write_bytes(_digest(content) + content)
                partial.replace(file)
            finally:
                partial.unlink(missing_ok=True)
        if (seconds := time.monotonic() - self._began) > NOTED_SECONDS:
            logger.info("compiled a kernel: %.1f s (%s)", seconds, self.name)

    def key(self, signature: Any, codegen: Any) -> Any:
        """A key that distinguishes code of the same name: dtypes, processor and bytecode. Sources are in the name."""
        return signature, codegen.magic_tuple(), self._bytecode

    def _file(self, key: Any) -> Path:
        return Path(self.cache_path) / f"{self.name}.{_digest(repr(key).encode()).hex()}.nbc"


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
