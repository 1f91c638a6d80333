"""The format of the rows in a message, and the pool of message buffers.

Features and gradients that travel in bfloat16 are widened on arrival, so that sums keep their precision.
"""

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from sar.config import Config
from sar.tensors.lasting import lasting

ALIGNMENT = 16
"""Bytes to which each field of a message is aligned, so that its rows can be viewed with their own dtype."""
OWN_MAPPING = 2**17
"""Minimum size in bytes of buffers with separate mappings. Mapping smaller buffers takes longer than using them."""
HUGE_PAGE = 2**21
"""Size in bytes from which a buffer may have huge pages."""
FORMATS, LAYOUTS = 64, 1024
"""Number of cached formats, and of cached layouts in each."""


class FieldFormat(NamedTuple):
    """Format of one field: dtype and shape of a row."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, tensor: Tensor) -> "FieldFormat":
        return cls(tensor.dtype, tuple(tensor.shape[1:]))


class MessageLayout(NamedTuple):
    """Layout of a message: its size in bytes, and the bytes, dtype and shape of each field."""

    nbytes: int
    fields: Sequence[tuple[slice, torch.dtype, Sequence[int]]]

    @classmethod
    def of(cls, formats: Sequence[FieldFormat], rows: Sequence[int]) -> "MessageLayout":
        """The layout of fields with these numbers of rows: one after another, each aligned."""
        end, fields = 0, []
        for (dtype, shape), count in zip(formats, rows, strict=True):
            size = count * prod(shape) * dtype.itemsize
            fields.append((slice(end, end + size), dtype, (count, *shape)))
            end += -(-size // ALIGNMENT) * ALIGNMENT
        return cls(end, fields)

    def views(self, message: Tensor) -> list[Tensor]:
        """The fields inside a message (uint8), (rows, ...) each."""
        views = []
        for place, dtype, shape in self.fields:  # faster than a comprehension before Python 3.12
            views.append(message[place].view(dtype).view(shape))
        return views


class RowFormat:
    """Format of the fields that travel together. Each has a row for every node.

    Attributes:
        row_elements: elements of one row.
        row_bytes: bytes of one row, without alignment.
    """

    def __init__(self, fields: tuple[FieldFormat, ...]) -> None:
        self.fields = fields
        self.row_elements = self.row_bytes = 0
        for dtype, shape in fields:
            self.row_elements += prod(shape)
            self.row_bytes += prod(shape) * dtype.itemsize
        # The layout of a message by its number of rows. Tiles have few sizes.
        self.layout = lru_cache(LAYOUTS)(lambda rows: MessageLayout.of(fields, [rows] * len(fields)))

    @classmethod
    def of(cls, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> "RowFormat":
        """The format of the rows of tensors, (N, ...) each, with `dtype` in place of wider floating-point types."""
        fields: tuple[tuple[torch.dtype, tuple[int, ...]], ...] = ()
        for tensor in tensors:
            fields += ((tensor.dtype, tensor.shape[1:]),)
        return _row_format(fields, dtype)


@lru_cache(FORMATS)
def _row_format(fields: tuple[tuple[torch.dtype, tuple[int, ...]], ...], dtype: torch.dtype | None) -> RowFormat:
    formats = []
    for kind, shape in fields:
        is_wider = dtype is not None and kind.is_floating_point and kind.itemsize > dtype.itemsize
        formats.append(FieldFormat(dtype if is_wider and dtype else kind, tuple(shape)))
    return RowFormat(tuple(formats))


@dataclass(eq=False)
class BufferPool:
    """Pool of one worker's message buffers.

    Large buffers in CPU memory are mapped separately, because an allocator would keep most of the freed memory
    (docs/memory.md).
    """

    _device: torch.device
    _free: list[Tensor] = field(init=False, default_factory=list)
    bytes_kept: int = field(init=False, default=0)  # size of the free buffers

    def take(self, size: int) -> Tensor:
        """A buffer of at least `size` bytes (uint8), contents undefined."""
        best = None
        for i, buffer in enumerate(self._free):
            if size <= buffer.nbytes <= 4 * size and (best is None or buffer.nbytes < self._free[best].nbytes):
                best = i
        if best is not None:
            self.bytes_kept -= self._free[best].nbytes
            return self._free.pop(best)
        return self._make(size)

    @lasting
    def _make(self, size: int) -> Tensor:
        if self._device.type != "cpu" or size < OWN_MAPPING:
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # freed with the tensor
        if size >= HUGE_PAGE:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def give(self, buffer: Tensor) -> None:
        """Return a buffer to the pool, which keeps at most `Config.comm_buffer_bytes`."""
        self._free.append(buffer)
        self.bytes_kept += buffer.nbytes
        if self.bytes_kept > Config.comm_buffer_bytes:
            self.shrink(Config.comm_buffer_bytes)

    def shrink(self, limit: int) -> None:
        """Free buffers, the oldest first, until at most `limit` bytes are left."""
        while self.bytes_kept > limit:
            self.bytes_kept -= self._free.pop(0).nbytes
