"""The format of the rows in a message, and the pool of message buffers.

[Note: scaled fields]
Features and gradients that travel in half precision are widened on arrival, so that sums keep their precision. float16
has a smaller range than float32: gradients of a mean over many nodes would become 0 in it, and features above 65504
infinite. So a field that is narrowed to a smaller range is divided by a power of two, its scale. We choose a scale for
each message so that its greatest finite number comes close to the greatest one of the narrow type. The scale stands in
front of the rows, and the division is exact. A number x arrives with an error of at most 2^-11 |x| in float16, or 2^-39
of the message's greatest number if that is more. Infinities and NaN do not change.
"""

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from math import frexp, prod
from typing import NamedTuple

import torch
from torch import Tensor

from sar.config import Config
from sar.tensor_views import to_device

ALIGNMENT = 16
"""Bytes to which each field of a message is aligned, so that its rows can be viewed with their own dtype."""
OWN_MAPPING = 2**17
"""Size in bytes from which a buffer gets a mapping of its own. For smaller ones, mapping takes longer than using it."""
HUGE_PAGE = 2**21
"""Size in bytes from which a buffer may have huge pages."""
FORMATS, LAYOUTS = 64, 1024
"""Number of cached formats, and of cached layouts in each."""


class FieldRows(NamedTuple):
    """The rows of one field inside a message, as views of its memory."""

    values: Tensor  # (rows, ...), as they travel
    scale: Tensor | None  # (1,) float64, factor of the values; None for 1: see [Note: scaled fields]

    def are_like(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether values on this device in this dtype can be written and read without a conversion."""
        return (self.values.device, self.values.dtype) == (device, dtype)

    def write(self, values: Tensor) -> None:
        """Write (rows, ...) values, which may be overwritten. A copy from a device is only queued there."""
        if self.scale is not None:
            # A power of two. Divided by it, the greatest finite value is 1/4 to 1 of the greatest number of the narrow
            # type. The power and its reciprocal are normal numbers of the values' own dtype.
            top = 2.0 ** (frexp(torch.finfo(self.values.dtype).max)[1] - 1)
            low, high = values.nan_to_num(0, 0, 0).aminmax()
            peak = torch.maximum(high, -low).clamp(min=torch.finfo(values.dtype).tiny * top)
            scale = peak / (torch.frexp(peak).mantissa * top)
            self.scale.copy_(scale, non_blocking=True)
            values.mul_(scale.reciprocal())
        self.values.copy_(values, non_blocking=True)

    def read(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Read the values, (rows, ...). The result is a view of the message if no conversion is needed."""
        values = to_device(self.values, device).to(dtype)
        return values if self.scale is None else values.mul_(to_device(self.scale, device).to(dtype))


class FieldFormat(NamedTuple):
    """Format of one field: dtype, shape of a row, and whether a scale precedes the rows ([Note: scaled fields])."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    scaled: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> "FieldFormat":
        return cls(tensor.dtype, tuple(tensor.shape[1:]))

    def narrowed(self, dtype: torch.dtype) -> "FieldFormat":
        """The format with `dtype` in place of a wider floating-point type, scaled if the range shrinks."""
        if not self.dtype.is_floating_point or self.dtype.itemsize <= dtype.itemsize:
            return self
        shrinks = torch.finfo(dtype).tiny > torch.finfo(self.dtype).tiny
        return FieldFormat(dtype, self.shape, scaled=shrinks and prod(self.shape) > 0)

    def aligned_bytes(self, rows: int) -> int:
        """Size in bytes of a number of rows in a message, with alignment."""
        values = -(-rows * prod(self.shape) * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return values + ALIGNMENT * self.scaled

    def view(self, message: Tensor, begin: int, rows: int) -> Tensor:
        """View of the rows in a message (uint8) from byte `begin` on, (rows, ...)."""
        begin += ALIGNMENT * self.scaled
        size = rows * prod(self.shape) * self.dtype.itemsize
        return message[begin : begin + size].view(self.dtype).view(rows, *self.shape)


class MessageLayout(NamedTuple):
    """Layout of a message: its size in bytes, and the offset of each field."""

    nbytes: int
    begins: tuple[int, ...]


class RowFormat:
    """Format of the fields that travel together. Each has a row for every node.

    Attributes:
        row_elements: elements of one row.
        row_bytes: bytes of one row, without alignment.
    """

    def __init__(self, fields: tuple[FieldFormat, ...]) -> None:
        self.fields = fields
        self.row_elements = self.row_bytes = 0
        for dtype, shape, _ in fields:
            self.row_elements += prod(shape)
            self.row_bytes += prod(shape) * dtype.itemsize
        self._layouts: dict[int, MessageLayout] = {}  # by rows; tiles have few sizes

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "RowFormat":
        """The format of the rows of tensors, (N, ...) each."""
        return _row_format(tuple([(tensor.dtype, tensor.shape[1:]) for tensor in tensors]))

    def narrowed(self, dtype: torch.dtype | None) -> "RowFormat":
        """The format with `dtype` in place of wider floating-point types; None changes nothing."""
        return self if dtype is None else RowFormat(tuple(field.narrowed(dtype) for field in self.fields))

    def layout(self, rows: int) -> MessageLayout:
        """The layout of a message of that many rows: field after field, each aligned."""
        layout = self._layouts.get(rows)
        if layout is None:
            if len(self._layouts) == LAYOUTS:
                self._layouts.clear()
            ends = [0, *accumulate(field.aligned_bytes(rows) for field in self.fields)]
            layout = self._layouts[rows] = MessageLayout(ends[-1], tuple(ends[:-1]))
        return layout

    def rows(self, message: Tensor, rows: int) -> list[FieldRows]:
        """The fields inside a message (uint8) of that many rows."""
        fields = []
        for form, begin in zip(self.fields, self.layout(rows).begins, strict=True):
            scale = message[begin : begin + torch.float64.itemsize].view(torch.float64) if form.scaled else None
            fields.append(FieldRows(form.view(message, begin, rows), scale))
        return fields

    def round(self, values: Sequence[Tensor]) -> None:
        """Round rows of the fields, (rows, ...) each, in place, as if they had travelled in this format."""
        if all(field.dtype == column.dtype for field, column in zip(self.fields, values, strict=True)):
            return
        message = torch.empty(self.layout(len(values[0])).nbytes, dtype=torch.uint8, device=values[0].device)
        for rows, column in zip(self.rows(message, len(values[0])), values, strict=True):
            rows.write(column)
            column.copy_(rows.read(column.device, column.dtype))


@lru_cache(FORMATS)
def _row_format(fields: tuple[tuple[torch.dtype, tuple[int, ...]], ...]) -> RowFormat:
    return RowFormat(tuple(FieldFormat(dtype, tuple(shape)) for dtype, shape in fields))


@dataclass(eq=False)
class BufferPool:
    """Pool of one worker's message buffers.

    Large buffers in CPU memory get mappings of their own, because an allocator would keep most of the freed memory
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
