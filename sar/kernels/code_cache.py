"""Compiled code that is kept on disk, and found again as long as none of its sources has changed."""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from sar.logging_setup import logger


def compile_cached(function: Callable[..., Any], njit: Any, options: dict[str, Any], *sources: Path) -> Any:
    """Compile a function with Numba's `njit` and keep its code on disk.

    Numba keeps code beside the source, else in the user's cache directory; where it can write neither, nothing is kept.
    It looks for changes only in the function's own file, but keeps code under the qualified name, which therefore gets
    a digest of all files that the code may come from.

    Args:
        function: what to compile.
        njit: Numba's.
        options: of `njit`.
        sources: files, and folders with all their Python files.
    """
    function.__qualname__ = f"{function.__name__}_{_digest(sources)}"
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:
        _log_once()
        return njit(**options)(function)


@cache
def _log_once() -> None:
    logger.info("Numba finds no folder for compiled code, which is made anew in every run")


@cache
def _digest(sources: tuple[Path, ...]) -> str:
    digest = hashlib.blake2b(digest_size=4)
    for source in sources:
        for file in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            digest.update(file.read_bytes())
    return digest.hexdigest()
