"""The two ways in which functions are compiled with Numba: entry points, and helpers that become part of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba

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
    for path in (*sorted(here.rglob("*.py")), here.parent / "attention_operands.py"):
        digest.update(path.read_bytes())
    return digest.hexdigest()
