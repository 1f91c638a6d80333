"""The format of rows in messages: the fields of a row, and where they lie among the bytes of a message."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes to which each field of a message is aligned, so that its rows can be viewed with their own dtype."""


@dataclass(frozen=True)
class FieldFormat:
    """The rows of one field: dtype, and the shape of a row."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, tensor: Tensor) -> "FieldFormat":
        return cls(tensor.dtype, tuple(tensor.shape[1:]))

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def aligned_bytes(self, rows: int) -> int:
        """Bytes that so many rows take in a message."""
        return -(-rows * self.elements * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def view(self, message: Tensor, begin: int, rows: int) -> Tensor:
        """The rows that lie in a message (uint8) from byte `begin` on, (rows, ...); they share its memory."""
        size = rows * self.elements * self.dtype.itemsize
        return message[begin : begin + size].view(self.dtype).view(rows, *self.shape)


@dataclass(frozen=True)
class RowFormat:
    """The fields that travel together, with a row each for every node."""

    fields: tuple[FieldFormat, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "RowFormat":
        """The format of rows of these tensors, (N, ...) each."""
        return cls(tuple(FieldFormat.of(tensor) for tensor in tensors))

    def narrowed(self, dtype: torch.dtype | None) -> "RowFormat":
        """The format with `dtype` in place of wider floating-point types; None changes nothing."""
        if dtype is None:
            return self
        fields = []
        for field in self.fields:
            wider = field.dtype.is_floating_point and field.dtype.itemsize > dtype.itemsize
            fields.append(replace(field, dtype=dtype) if wider else field)
        return RowFormat(tuple(fields))

    @property
    def row_elements(self) -> int:
        return sum(field.elements for field in self.fields)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, without alignment."""
        return sum(field.elements * field.dtype.itemsize for field in self.fields)

    def message_bytes(self, rows: int) -> int:
        """Bytes of a message of that many rows: field after field, each aligned."""
        return sum(field.aligned_bytes(rows) for field in self.fields)

    def views(self, message: Tensor, rows: int) -> list[Tensor]:
        """The fields inside a message (uint8), (rows, ...) each; they share its memory."""
        views, begin = [], 0
        for field in self.fields:
            views.append(field.view(message, begin, rows))
            begin += field.aligned_bytes(rows)
        return views
