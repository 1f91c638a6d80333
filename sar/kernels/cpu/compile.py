"""The two ways in which functions are compiled with Numba: entry points, and helpers that become part of them.

[Note: one module]
Numba would make machine code of every helper, with two wrappers for callers that it does not have, and optimise it with
all that it calls, again at each level. Three quarters of the time went there. Here a helper is no more than LLVM's
code as Numba emits it; the entry point takes that of all its helpers, and all of it is optimised once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder

from sar.kernels.code_cache import compile_cached

F = TypeVar("F", bound=Callable[..., Any])

# Not `fastmath=True`: its "nnan" and "ninf" allow to drop the comparisons that NaN and infinities depend on.
FAST_MATH = ("contract", "reassoc", "nsz", "arcp")

_OPTIONS = {
    "nogil": True,
    "error_model": "numpy",  # division by zero gives inf or NaN
    "fastmath": set(FAST_MATH),
    # No reference counting: the loops only borrow their arrays, and an atomic count per edge is slower than the edge.
    "_nrt": False,
    "no_cfunc_wrapper": True,
}

_njit: Any = numba.njit
_Library: Any = JITCodeLibrary
_Compiler: Any = CompilerBase
_SOURCES = Path(__file__).parent, Path(__file__).parent.parent / "attention_operands.py"


class _Part(_Library):  # type: ignore[misc]
    """The code of a helper: no machine code, hence no address and no environment."""

    def finalize(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0

    @property
    def codegen(self) -> Any:
        return self  # of which Numba only asks `set_env`

    def set_env(self, name: str, env: Any) -> None:
        pass


class _Whole(_Library):  # type: ignore[misc]
    """The code of an entry point, and of the helpers that it calls."""

    def finalize(self) -> None:
        order: dict[Any, None] = {}  # callees first

        def visit(library: Any) -> None:
            if library not in order:
                for called in library._linking_libraries if isinstance(library, _Part | _Whole) else ():
                    visit(called)
                order[library] = None

        visit(self)
        # Callers first: LLVM leaves out what nothing linked so far refers to.
        self._linking_libraries = list(order)[-2::-1]
        super().finalize()


def _compiler(library: Any) -> Any:
    """Numba's compiler, with code of this kind."""

    class Compiler(_Compiler):  # type: ignore[misc]
        def define_pipelines(self) -> list[Any]:
            state = self.state
            state.library = library(state.targetctx.codegen(), state.func_id.func_qualname)
            state.library.enable_object_caching()
            return [DefaultPassBuilder.define_nopython_pipeline(state)]

    return Compiler


_ENTRY_POINT, _HELPER = _compiler(_Whole), _compiler(_Part)


def kernel(function: F) -> F:
    """Compile an entry point and keep its code on disk."""
    compiled: F = compile_cached(function, _njit, {**_OPTIONS, "pipeline_class": _ENTRY_POINT}, *_SOURCES)
    return compiled


def inline(function: F) -> F:
    """Compile a helper into each kernel that calls it."""
    options = {**_OPTIONS, "no_cpython_wrapper": True, "pipeline_class": _HELPER}
    compiled: F = _njit(forceinline=True, **options)(function)
    return compiled
