"""Memory of tensors: as numpy arrays, for compiled code, and in a file, where memory is left to others in turns.

Only threads that train partitions in turns have a `TensorFile`; those of others are in memory, as always.
"""

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any, Final, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from sar.per_thread import PerThread

LEAST_BYTES = 2**13
"""Of a tensor that leaves memory. There are p x p blocks of edges, of which all that is smaller stays."""


HALF_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}


class TensorFile(Protocol):
    """A file in which tensors lie, mapped into memory; on one type of device.

    at_hand: bytes of all partitions' rows that stay in memory from one turn to the next; the same on all workers.
    """

    device: str
    at_hand: float

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in the file, contents undefined."""

    def moved(self, tensor: Tensor) -> Tensor:
        """A tensor in the file that stays as it is, with what this one has."""

    def use(self, tensor: Tensor) -> object:
        """Have a tensor at hand that is used now."""


tensor_file: Final = PerThread[TensorFile | None](None)
"""Where what this thread asks for lies."""


def resolved(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy of a conjugate or negative view, whose memory has other numbers than it shows."""
    return tensor.resolve_conj().resolve_neg()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; from the CPU a copy not waited for, so pinned memory must stay as it is."""
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


@cache
def side_stream(device: torch.device) -> Any:
    """The stream beside the one that computes; one for each device, as torch keeps what is freed for its own stream."""
    return getattr(torch, device.type).Stream(device)


def flat(tensor: Tensor | None) -> NDArray[Any]:
    """The elements of a tensor, row after row; shares its memory where that is contiguous.

    Half precisions, which compiled code has no types for, as their bits: see `sar.kernels.compiler.wide`.
    """
    assert tensor is not None
    rows = tensor
    if not rows.is_contiguous() or rows.is_conj() or rows.is_neg():
        rows = resolved(rows).contiguous()
    if (file := tensor_file.value) is not None:
        file.use(rows)
    with torch._C._DisableTorchDispatch():  # else a mode would see three operations, each slower than all of this
        if rows.requires_grad or rows.dtype in HALF_BITS:
            rows = rows.detach().view(HALF_BITS.get(rows.dtype, rows.dtype))
        return rows.numpy().reshape(-1)


def bytes_of(tensor: Tensor) -> Tensor:
    """The elements of a tensor on any device, row after row, as uint8 on the CPU."""
    rows = resolved(tensor.detach()).cpu().contiguous()
    return rows.as_strided((rows.numel(),), (1,)).view(torch.uint8)  # one element may have any stride


def as_bytes(tensor: Tensor) -> memoryview:
    """As `bytes_of`, for checksums and files."""
    return bytes_of(tensor).numpy().data


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are summed: half precisions in float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def spills(device: torch.device | str) -> bool:
    """Whether tensors of this thread on a device lie in a file."""
    return _file_for(device) is not None


def at_hand(device: torch.device) -> float:
    """`TensorFile.at_hand` of this thread's file; no limit where tensors are not in a file."""
    file = _file_for(device)
    return float("inf") if file is None else file.at_hand


def empty_spillable(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu", *, zeros: bool = False
) -> Tensor:
    """A tensor, undefined or zeros, in this thread's file where there is one: then it never is in memory as a whole."""
    file = _file_for(device)
    if file is None or prod(shape) * dtype.itemsize < max(LEAST_BYTES, 1):
        return (torch.zeros if zeros else torch.empty)(shape, dtype=dtype, device=device)
    place = file.empty(shape, dtype)
    return place.zero_() if zeros else place


def moved_to_file(tensor: Tensor) -> Tensor:
    """The tensor, which will stay for long and as it is, in this thread's file where there is one."""
    file = tensor_file.value
    return tensor if file is None or tensor.is_meta != (file.device == "meta") else file.moved(tensor)


def _file_for(device: torch.device | str) -> TensorFile | None:
    file = tensor_file.value
    return file if file is not None and torch.device(device).type == file.device else None
