"""Several tensors in one message: its bytes, their lengths, then their bytes, each from a multiple of eight on."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 8


class Form(NamedTuple):
    """What both ends know of a tensor beforehand: all but its length."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()  # of one row

    @classmethod
    def of(cls, tensor: Tensor) -> "Form":
        """The form of a tensor's rows."""
        return cls(tensor.dtype, tuple(tensor.shape[1:]))

    def nbytes(self, rows: int) -> int:
        """Bytes of that many rows in a message."""
        size = rows * self.dtype.itemsize * torch.Size(self.shape).numel()
        return -(-size // ALIGNMENT) * ALIGNMENT

    def view(self, buffer: Tensor, begin: int, rows: int) -> Tensor:
        """The rows that lie in `buffer` from byte `begin` on."""
        size = rows * self.dtype.itemsize * torch.Size(self.shape).numel()
        if not size:
            return torch.empty(rows, *self.shape, dtype=self.dtype)
        return buffer[begin : begin + size].view(self.dtype).view(rows, *self.shape)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors in one message, uint8."""
    forms, begin = [Form.of(tensor) for tensor in tensors], ALIGNMENT * (1 + len(tensors))
    nbytes = begin + sum(form.nbytes(len(tensor)) for form, tensor in zip(forms, tensors, strict=True))
    message = torch.empty(nbytes, dtype=torch.uint8)
    message[:begin].view(torch.int64).copy_(torch.tensor([nbytes, *map(len, tensors)]))
    for form, tensor in zip(forms, tensors, strict=True):
        form.view(message, begin, len(tensor)).copy_(tensor)
        begin += form.nbytes(len(tensor))
    return message


def unpack(message: Tensor, forms: Sequence[Form]) -> list[Tensor]:
    """The tensors of a message, as views of it."""
    begin = ALIGNMENT * (1 + len(forms))
    _, *lengths = message[:begin].view(torch.int64).tolist()
    tensors = []
    for form, rows in zip(forms, lengths, strict=True):
        tensors.append(form.view(message, begin, rows))
        begin += form.nbytes(rows)
    return tensors
