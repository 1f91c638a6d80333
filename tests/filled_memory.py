"""New memory has NaN in it, or the greatest integer, so that a test fails if sar reads what it has not written.

`torch.empty` and its like are replaced for everybody, `numpy.empty` in the modules of sar only, because Numba has to
find NumPy's own in what it compiles.
"""

import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sar

COMPILED = ("sar.kernels.cpu", "sar.sampling.loops")
LEFT_OUT = (*COMPILED, "sar.adapters.pyg", "sar.pyg", "sar.__main__", "sar.cli.__main__")
"""Modules that are programs, need optional packages, or are compiled."""


class _Filling(ModuleType):
    """NumPy, but for memory without contents."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def empty(*args: Any, **kwargs: Any) -> Any:
        return _filled(np.empty(*args, **kwargs))

    @staticmethod
    def empty_like(*args: Any, **kwargs: Any) -> Any:
        return _filled(np.empty_like(*args, **kwargs))


_NUMPY = _Filling("numpy")


def _filled(array: Any) -> Any:
    if array.dtype.kind in "fciu":
        array.fill(np.nan if array.dtype.kind in "fc" else np.iinfo(array.dtype).max)
    return array


def _filling(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        tensor = original(*args, **kwargs)
        if not tensor.is_meta and tensor.layout == torch.strided and tensor.numel():
            floating = tensor.is_floating_point() or tensor.is_complex()
            with torch.no_grad():
                tensor.fill_(torch.nan if floating else tensor.dtype == torch.bool or torch.iinfo(tensor.dtype).max)
        return tensor

    made.filling = True  # type: ignore[attr-defined]
    return made


def install(*, everywhere: bool = False) -> None:
    """Fill new memory in this process and in those forked from it.

    `numpy.empty` is replaced in the modules of sar that are loaded; `everywhere` loads all of them, and so Numba.
    """
    if not hasattr(torch.empty, "filling"):
        for owner, names in ((torch, ("empty", "empty_like", "empty_strided")), (Tensor, ("new_empty",))):
            for name in names:
                setattr(owner, name, _filling(getattr(owner, name)))
    for found in pkgutil.walk_packages(sar.__path__, "sar.") if everywhere else ():
        if not found.name.startswith(LEFT_OUT):
            importlib.import_module(found.name)
    for name, module in list(sys.modules.items()):
        if name.startswith("sar.") and getattr(module, "np", None) is np and not name.startswith(COMPILED):
            module.np = _NUMPY  # type: ignore[attr-defined]
