"""Numba's compiler, told to make one module of LLVM's of an entry point and all helpers that it calls.

[Note: one module]
Numba would make machine code of every helper, with two wrappers for callers that it does not have, and optimise it with
all that it calls, again at each level. Three quarters of the time went there. Here a helper is no more than LLVM's
code as Numba emits it; the entry point takes that of all its helpers, and all of it is optimised once.
"""

from __future__ import annotations

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder

_Library: Any = JITCodeLibrary
_Compiler: Any = CompilerBase


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


ENTRY_POINT, HELPER = _compiler(_Whole), _compiler(_Part)
