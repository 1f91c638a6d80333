"""The Numba kernels, where Numba is installed."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType


@cache
def numba_kernels() -> ModuleType | None:
    """The module of Numba kernels; None without Numba. Imported at the first use, because Numba takes long to load."""
    return importlib.import_module("sar.kernels.cpu.aggregate") if importlib.util.find_spec("numba") else None
