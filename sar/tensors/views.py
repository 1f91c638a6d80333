"""Tensors as numpy arrays for compiled code, as bytes for messages, files and checksums, and on other devices."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from sar.tensors.spillable import tensor_file

HALF_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
"""Numba has no half precisions, and takes their bits instead; the two types must be distinct."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are summed: half precisions in float32."""
    return torch.float32 if dtype in HALF_BITS else dtype


def materialize(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it is a conjugate or negative view, whose memory holds other numbers."""
    return tensor.resolve_conj().resolve_neg()


def as_numpy(tensor: Tensor | None) -> NDArray[Any]:
    """The elements of a tensor in row-major order; shares its memory if that is contiguous.

    Half precisions, for which compiled code has no types, become their bits: see `sar.host.compiler.wide`.
    """
    assert tensor is not None
    rows = tensor
    if not rows.is_contiguous() or rows.is_conj() or rows.is_neg():
        rows = materialize(rows).contiguous()
    if (file := tensor_file.value) is not None:
        file.use(rows)
    with torch._C._DisableTorchDispatch():  # else a mode sees three operations, each slower than this function
        if rows.requires_grad or rows.dtype in HALF_BITS:
            rows = rows.detach().view(HALF_BITS.get(rows.dtype, rows.dtype))
        return rows.numpy().reshape(-1)


def bytes_of(tensor: Tensor) -> Tensor:
    """The elements of a tensor on any device in row-major order, as uint8 on the CPU."""
    rows = materialize(tensor.detach()).cpu().contiguous()
    return rows.as_strided((rows.numel(),), (1,)).view(torch.uint8)  # one element may have any stride


def as_bytes(tensor: Tensor) -> memoryview:
    """Like `bytes_of`, for checksums and files."""
    return bytes_of(tensor).numpy().data


def described(tensor: Tensor) -> str:
    """Dtype and shape of a tensor, for calls and errors."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. Copies from pinned memory are asynchronous, so it must not change meanwhile."""
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")
