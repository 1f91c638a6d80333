"""What messages are made of: the format of their rows, and memory for them.

[Note: scaled fields]
Features and gradients that travel in a half precision are widened on arrival, so that sums are as they were. float16
has a smaller range than float32: gradients of a mean over many nodes would become 0 in it, and features above 65504
infinite. So a field that is narrowed to a smaller range travels as multiples of a power of two, which is chosen for
each message so that its greatest finite number comes close to the greatest one of the narrow type, and stands before
the rows. Such a division is exact. A number x arrives within 2^-11 |x| in float16, or 2^-39 of the message's greatest
number where that is more; infinities and NaN arrive as they are.
"""

import contextlib
import mmap
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import frexp, prod
from typing import NamedTuple

import torch
from torch import Tensor

from sar.comm.devices import to_device
from sar.config import Config

ALIGNMENT = 16
"""Bytes to which each field of a message is aligned, so that its rows can be viewed with their own dtype."""
OWN_MAPPING = 2**17
"""Bytes from which on a buffer has a mapping of its own: for less, to make one takes longer than to use it."""
HUGE_PAGE = 2**21
"""Bytes from which on a buffer may have huge pages."""


FORMATS, LAYOUTS = 64, 1024
"""Formats that are kept, and message sizes that each of them knows."""


class FieldRows(NamedTuple):
    """The rows of one field inside a message, with which they share memory."""

    values: Tensor  # (rows, ...), as they travel
    scale: Tensor | None  # (1,) float64, what they are multiples of; None for 1: see [Note: scaled fields]

    def are_like(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether values of this kind need no conversion on their way in or out."""
        return (self.values.device, self.values.dtype) == (device, dtype)

    def write(self, values: Tensor) -> None:
        """Take in (rows, ...) values, which are used up; from a device, once what is queued there is done."""
        if self.scale is not None:
            scale = _scale(values, self.values.dtype)
            self.scale.copy_(scale, non_blocking=True)
            values.mul_(scale.reciprocal())
        self.values.copy_(values, non_blocking=True)

    def read(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The values as they were written, rounded, (rows, ...); the message's memory where that is what they are."""
        values = to_device(self.values, device).to(dtype)
        return values if self.scale is None else values.mul_(to_device(self.scale, device).to(dtype))


class FieldFormat(NamedTuple):
    """The rows of one field: dtype, the shape of a row, and whether a scale precedes them ([Note: scaled fields])."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    scaled: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> "FieldFormat":
        return cls(tensor.dtype, tuple(tensor.shape[1:]))

    def narrowed(self, dtype: torch.dtype) -> "FieldFormat":
        """The field in `dtype` in place of a wider floating-point type, scaled if the range shrinks."""
        if not self.dtype.is_floating_point or self.dtype.itemsize <= dtype.itemsize:
            return self
        shrinks = torch.finfo(dtype).tiny > torch.finfo(self.dtype).tiny
        return FieldFormat(dtype, self.shape, scaled=shrinks and prod(self.shape) > 0)

    def aligned_bytes(self, rows: int) -> int:
        """Bytes that so many rows take in a message."""
        values = -(-rows * prod(self.shape) * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return values + ALIGNMENT * self.scaled

    def view(self, message: Tensor, begin: int, rows: int) -> Tensor:
        """The rows that lie in a message (uint8) from byte `begin` on, (rows, ...); they share its memory."""
        begin += ALIGNMENT * self.scaled
        size = rows * prod(self.shape) * self.dtype.itemsize
        return message[begin : begin + size].view(self.dtype).view(rows, *self.shape)


class MessageLayout(NamedTuple):
    """Where the fields lie in a message of some rows: bytes of all, and of each field."""

    nbytes: int
    begins: tuple[int, ...]


class RowFormat:
    """The fields that travel together, with a row each for every node.

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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowFormat) and self.fields == other.fields

    def __hash__(self) -> int:
        return hash(self.fields)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "RowFormat":
        """The format of rows of these tensors, (N, ...) each."""
        return _row_format(tuple([(tensor.dtype, tensor.shape[1:]) for tensor in tensors]))

    def narrowed(self, dtype: torch.dtype | None) -> "RowFormat":
        """The format with `dtype` in place of wider floating-point types; None changes nothing."""
        return self if dtype is None else RowFormat(tuple(field.narrowed(dtype) for field in self.fields))

    def layout(self, rows: int) -> MessageLayout:
        """The layout of a message of that many rows: field after field, each aligned."""
        found = self._layouts.get(rows)
        if found is None:
            if len(self._layouts) == LAYOUTS:
                self._layouts.clear()
            ends = [0, *accumulate(field.aligned_bytes(rows) for field in self.fields)]
            found = self._layouts[rows] = MessageLayout(ends[-1], tuple(ends[:-1]))
        return found

    def message_bytes(self, rows: int) -> int:
        """Bytes of a message of that many rows."""
        return self.layout(rows).nbytes

    def rows(self, message: Tensor, rows: int) -> list[FieldRows]:
        """The fields inside a message (uint8) of that many rows."""
        found = []
        layout = self._layouts.get(rows) or self.layout(rows)
        for field, begin in zip(self.fields, layout.begins, strict=True):
            scale = message[begin : begin + torch.float64.itemsize].view(torch.float64) if field.scaled else None
            found.append(FieldRows(field.view(message, begin, rows), scale))
        return found

    def round(self, values: Sequence[Tensor]) -> None:
        """Round rows of the fields, (rows, ...) each, in place, as they would be if they travelled in this format."""
        if all(field.dtype == one.dtype for field, one in zip(self.fields, values, strict=True)):
            return
        message = torch.empty(self.message_bytes(len(values[0])), dtype=torch.uint8, device=values[0].device)
        for rows, one in zip(self.rows(message, len(values[0])), values, strict=True):
            rows.write(one)
            one.copy_(rows.read(one.device, one.dtype))


@lru_cache(FORMATS)
def _row_format(fields: tuple[tuple[torch.dtype, tuple[int, ...]], ...]) -> RowFormat:
    return RowFormat(tuple(FieldFormat(dtype, tuple(shape)) for dtype, shape in fields))


def _scale(values: Tensor, dtype: torch.dtype) -> Tensor:
    """A power of two, (): divided by it, the greatest finite one of the values is 1/4 to 1 of the greatest of `dtype`.

    It and its reciprocal are normal numbers of the values' own type.
    """
    top = 2.0 ** (frexp(torch.finfo(dtype).max)[1] - 1)
    low, high = values.nan_to_num(0, 0, 0).aminmax()
    peak = torch.maximum(high, -low).clamp(min=torch.finfo(values.dtype).tiny * top)
    return peak / (torch.frexp(peak).mantissa * top)


class BufferPool:
    """Message buffers of one worker.

    In CPU memory large ones have mappings of their own: an allocator would keep most of what is freed (docs/memory.md).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []
        self.bytes_kept = 0  # of buffers that nobody uses now

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
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # until the tensor goes
        if size >= HUGE_PAGE:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def give(self, buffer: Tensor | None) -> None:
        """Take a buffer back; the oldest ones go when the pool outgrows `Config.comm_buffer_bytes`."""
        if buffer is None:
            return
        self._free.append(buffer)
        self.bytes_kept += buffer.nbytes
        while self.bytes_kept > Config.comm_buffer_bytes:
            self.bytes_kept -= self._free.pop(0).nbytes

    def clear(self) -> None:
        self._free.clear()
        self.bytes_kept = 0
