"""Which implementation serves given tensors: the Numba kernels where they can, the torch reference elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from sar.kernels import reference


@cache
def numba_kernels() -> ModuleType | None:
    """The module of Numba kernels; None where Numba is not installed. Imported late: Numba takes a while to load."""
    return importlib.import_module("sar.kernels.numba_cpu") if importlib.util.find_spec("numba") else None


def choose(*tensors: Tensor | None) -> ModuleType:
    """The implementation for operands and results `tensors`."""
    given = [tensor for tensor in tensors if tensor is not None]
    dtype = given[0].dtype
    fit = dtype in (torch.float32, torch.float64) and all(
        tensor.dtype is dtype and tensor.device.type == "cpu" and tensor.numel() for tensor in given
    )
    return numba_kernels() or reference if fit else reference
