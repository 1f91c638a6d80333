"""How the loops of partition methods are compiled."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba

from sar.kernels.compiler.shared_cache import compile_cached

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile a loop with Numba and keep its code on disk; it may call helpers from its folder."""
    loop: F = compile_cached(
        function, numba.njit, {"nogil": True, "error_model": "numpy"}, Path(inspect.getfile(function)).parent
    )
    return loop
