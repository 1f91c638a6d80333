"""How the loops of partition methods are compiled."""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba

from sar.logging_setup import logger

F = TypeVar("F", bound=Callable[..., Any])
_njit: Any = numba.njit


def compiled(function: F) -> F:
    """Compile a loop with Numba and keep its code on disk, where Numba finds a place to write to.

    Numba looks for changes only in the function's own file, but keeps code under its qualified name; a digest of all
    files in this folder, from which it may call helpers, is therefore put into the name.
    """
    function.__qualname__ = f"{function.__name__}_{_sources_digest()}"
    try:
        loop: F = _njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:
        _log_once()
        loop = _njit(nogil=True, error_model="numpy")(function)
    return loop


@cache
def _log_once() -> None:
    logger.info("Numba finds no folder for compiled code: the loops of partition methods are compiled in every run")


@cache
def _sources_digest() -> str:
    digest = hashlib.blake2b(digest_size=4)
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
