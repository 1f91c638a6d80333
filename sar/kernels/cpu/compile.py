"""The two ways in which functions are compiled with Numba: entry points, and helpers that become part of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba

from sar.kernels.compiler.one_module import ENTRY_POINT, HELPER
from sar.kernels.compiler.shared_cache import compile_cached

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
_KERNELS = Path(__file__).parents[1]
_SOURCES = Path(__file__).parent, _KERNELS / "compiler", _KERNELS / "attention_operands.py"


def kernel(function: F) -> F:
    """Compile an entry point and keep its code on disk."""
    compiled: F = compile_cached(function, _njit, {**_OPTIONS, "pipeline_class": ENTRY_POINT}, *_SOURCES)
    return compiled


def inline(function: F) -> F:
    """Compile a helper into each kernel that calls it."""
    options = {**_OPTIONS, "no_cpython_wrapper": True, "pipeline_class": HELPER}
    compiled: F = _njit(forceinline=True, **options)(function)
    return compiled
