"""Memory of tensors as numpy arrays, for compiled code.

`Tensor.numpy` fixes a storage's memory for good, so that it could no longer leave ([Note: leaving memory]). An array
made here owns a reference to the tensor instead, and is to be let go of with the call that it is made for.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

writes_seen_by: Final[list[Callable[[Tensor], None]]] = []
"""Called with each tensor that compiled code is about to write, which torch does not see; empty in most processes."""

settled_by: Final[list[Callable[[Tensor], Tensor]]] = []
"""What has a better place than memory for a tensor that nobody changes; empty in most processes."""


class _Memory:
    """What numpy needs to know of a tensor, which lives as long."""

    def __init__(self, tensor: Tensor, shape: tuple[int, ...]) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": _type(tensor.dtype),
            "data": (tensor.data_ptr(), False),
        }


@cache
def _type(dtype: torch.dtype) -> str:
    name: str = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype.str
    return name


def resolved(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy of a conjugate or negative view, whose memory has other numbers than it shows."""
    return tensor.resolve_conj().resolve_neg()


def as_array(tensor: Tensor) -> NDArray[Any]:
    """The memory of a contiguous tensor that needs no gradient; see above."""
    tensor = resolved(tensor)
    return np.asarray(_Memory(tensor, tuple(tensor.shape))) if writes_seen_by else tensor.numpy()


def flat(tensor: Tensor | None) -> NDArray[Any]:
    """The elements of a tensor, row after row; shares its memory where that is contiguous."""
    assert tensor is not None
    tensor = resolved(tensor).contiguous()
    return np.asarray(_Memory(tensor, (tensor.numel(),))) if writes_seen_by else tensor.detach().numpy().reshape(-1)


def settled(tensor: Tensor) -> Tensor:
    """A tensor that will stay for long, and as it is, in the place for such."""
    for place in settled_by:
        tensor = place(tensor)
    return tensor


def will_be_written(*tensors: Tensor | None) -> None:
    """Tell whom it concerns that compiled code is about to write these."""
    for see in writes_seen_by:
        for tensor in tensors:
            if tensor is not None:
                see(tensor)
