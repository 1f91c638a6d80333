"""Memory of tensors out of core: it is in a file, so it can leave RAM between the turns of a worker.

Only workers that share a process have such a file (`sar.outofcore`); otherwise tensors are allocated as usual.
The file belongs to the thread rather than being an argument, because kernels and readers only receive tensors.
"""

from collections.abc import Sequence
from math import prod
from typing import Final, Protocol

import torch
from torch import Tensor

from sar.host.per_thread import PerThread

LEAST_BYTES = 2**13
"""Smaller tensors stay in memory. Many of the p x p blocks of edges are smaller."""


class TensorFile(Protocol):
    """A file with tensors that is mapped into memory, for one type of device.

    at_hand: limit in bytes for rows of all partitions that stay in memory between turns; the same on all workers.
    """

    device: str
    at_hand: float

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor in the file."""

    def moved(self, tensor: Tensor) -> Tensor:
        """A constant copy of a tensor in the file."""

    def use(self, tensor: Tensor) -> object:
        """Read a tensor into memory before its use."""


tensor_file: Final = PerThread[TensorFile | None](None)
"""The file of the worker that runs in this thread."""


def spills(device: torch.device | str) -> bool:
    """Whether this thread's tensors on a device are in a file."""
    return _file_for(device) is not None


def at_hand(device: torch.device | str) -> float:
    """`TensorFile.at_hand` of this thread's file; infinite without one."""
    file = _file_for(device)
    return float("inf") if file is None else file.at_hand


def empty_spillable(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """An uninitialised tensor; in this thread's file if there is one, so never in memory as a whole."""
    file = None if tensor_file.value is None else _file_for(device)
    if file is None or prod(shape) * dtype.itemsize < max(LEAST_BYTES, 1):
        return torch.empty(shape, dtype=dtype, device=device)
    return file.empty(shape, dtype)


def moved_to_file(tensor: Tensor) -> Tensor:
    """A long-lived constant tensor, in this thread's file if there is one."""
    file = _file_for("meta" if tensor.is_meta else "cpu")
    return tensor if file is None else file.moved(tensor)


def _file_for(device: torch.device | str) -> TensorFile | None:
    file = tensor_file.value
    return file if file is not None and torch.device(device).type == file.device else None
