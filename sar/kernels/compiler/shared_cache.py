"""Numba's cache of compiled code, told where code lies and whose turn it is: see [Note: compiled once]."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

from sar.kernels.code_cache import Turn, code_folder, digest_of

_Locator: Any = _CacheLocator
_Files: Any = CompileResultCacheImpl
_Cache: Any = FunctionCache


class _OneFolder(_Locator):  # type: ignore[misc]
    """All code in one folder, whatever environment its source lies in; names tell it apart."""

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> _OneFolder:
        return cls()

    def get_cache_path(self) -> str:
        return str(code_folder())

    def get_source_stamp(self) -> str:
        return "in the name"

    def get_disambiguator(self) -> str:
        return "kernel"


class _KernelFiles(_Files):  # type: ignore[misc]
    _locator_classes = (_OneFolder,)


class SharedCache(_Cache):  # type: ignore[misc]
    """One kernel's code, made by one process for all of a host."""

    _impl_class = _KernelFiles

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._turn: Turn | None = None
        self._began = 0.0

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The code for a signature; None where this process is to make it now, which `save_overload` ends."""
        found = super().load_overload(sig, target_context)
        if found is None:
            self._end_turn()  # where making it failed
            self._began = time.monotonic()
            self._turn = Turn(self._impl.filename_base)
            found = super().load_overload(sig, target_context)
            if found is not None:
                self._end_turn()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk: this process has its code
            super().save_overload(sig, data)
        self._end_turn()

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._turn.end(self._began)
            self._turn = None


def compile_cached(function: Callable[..., Any], njit: Any, options: dict[str, Any], *sources: Path) -> Any:
    """Compile a function with Numba's `njit` and keep its code on disk, in `code_folder`.

    Numba looks for changes only in the function's own file, but keeps code under the qualified name, which therefore
    gets a digest of all files that the code may come from.

    Args:
        function: what to compile.
        njit: Numba's.
        options: of `njit`.
        sources: files, and folders with all their Python files.
    """
    function.__qualname__ = f"{function.__name__}_{digest_of(*sources)}"
    compiled = njit(**options)(function)
    if code_folder() is not None:
        compiled._cache = SharedCache(function)
    return compiled
