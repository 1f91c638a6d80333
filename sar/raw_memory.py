"""Memory of tensors as numpy arrays, for compiled code, and the place of what is kept for long."""

import threading
from typing import Any, Final

import torch
from numpy.typing import NDArray
from torch import Tensor

here: Final = threading.local()
"""settle: what has a better place than memory for a tensor that nobody changes; most threads have none."""


def resolved(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy of a conjugate or negative view, whose memory has other numbers than it shows."""
    return tensor.resolve_conj().resolve_neg()


def flat(tensor: Tensor | None) -> NDArray[Any]:
    """The elements of a tensor, row after row; shares its memory where that is contiguous."""
    assert tensor is not None
    return resolved(tensor).contiguous().detach().numpy().reshape(-1)


def as_bytes(tensor: Tensor) -> memoryview:
    """The elements of a tensor on any device, row after row, as bytes, for checksums."""
    rows = resolved(tensor.detach()).cpu().contiguous()
    return rows.as_strided((rows.numel(),), (1,)).view(torch.uint8).numpy().data  # one element may have any stride


def settled(tensor: Tensor) -> Tensor:
    """A tensor that will stay for long, and as it is, in the place for such."""
    settle = getattr(here, "settle", None)
    found: Tensor = tensor if settle is None else settle(tensor)
    return found
