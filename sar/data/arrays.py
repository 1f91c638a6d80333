"""Arrays in files, read and written in slices of rows; opens files for reading.

Rows are read, not memory-mapped, because pages of a mapping count as memory of the process until the system reclaims
them: streaming a large file would look like holding all of it.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from sar.errors import PartitionError

if TYPE_CHECKING:  # it is imported where tensors are made: commands that make none start in a third of the time
    import torch

Array = NDArray[Any]

BFLOAT16: Final = np.dtype("V2")
"""Represents bfloat16, which numpy lacks."""
_SLICE_BYTES = 4 << 20


@dataclass(frozen=True)
class StoredArray:
    """An array in a file, in C order. It is a column: slices of rows are numpy arrays."""

    path: Path
    offset: int  # bytes before the first row
    shape: tuple[int, ...]  # (rows, ...)
    stored: np.dtype[Any]  # in the file, in either byte order; rows come in the machine's

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        return self.stored.newbyteorder("=")

    @property
    def dtype_name(self) -> str:
        return "bfloat16" if self.stored == BFLOAT16 else self.dtype.name

    @cached_property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.stored.itemsize

    def __getitem__(self, rows: slice, /) -> Array:
        start, stop, _ = rows.indices(self.shape[0])
        values = np.empty((max(0, stop - start), *self.shape[1:]), self.stored)
        with open_file(self.path) as file:
            file.seek(self.offset + start * self.row_bytes)
            self._fill(file, values)
        return values.astype(self.dtype, copy=False)

    def slices(self) -> Iterator[tuple[int, Array]]:
        """Yield the number of the first row and consecutive rows, in a buffer that the next slice overwrites.

        Rows are in the machine's byte order.
        """
        step = max(1, _SLICE_BYTES // self.row_bytes) if self.row_bytes else max(1, self.shape[0])
        with open_file(self.path) as file:
            file.seek(self.offset)
            buffer = np.empty((min(step, self.shape[0]), *self.shape[1:]), self.dtype)
            for start in range(0, self.shape[0], step):
                rows = buffer[: self.shape[0] - start]
                self._fill(file, rows)
                yield start, rows

    def load(
        self,
        device: torch.device | str = "cpu",
        position: torch.Tensor | None = None,
        *,
        empty: Callable[..., torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Read the array to a device in slices; with `position`, row i of the file is row `position[i]` of the result.

        `empty` creates the result, with the arguments of `torch.empty`, the default.
        """
        import torch

        result = (empty or torch.empty)(self.shape, dtype=getattr(torch, self.dtype_name), device=device)
        if position is None and result.device.type == "cpu":
            with open_file(self.path) as file:
                file.seek(self.offset)
                self._fill(file, result.view(-1).view(torch.uint8).numpy())
            return result
        for start, values in self.slices():
            rows = torch.from_numpy(values.view(np.uint8)).view(result.dtype)  # numpy lacks bfloat16
            if position is None:
                result[start : start + len(rows)] = rows.to(device)
            else:
                chunk = position[start : start + len(rows)]
                result.index_copy_(0, chunk.to(device=device, dtype=torch.int64), rows.to(device))
        return result

    def _fill(self, file: BinaryIO, rows: Array) -> None:
        if rows.size and file.readinto(_bytes_of(rows)) != rows.nbytes:  # type: ignore[attr-defined]
            raise PartitionError(
                f"{self.path} is truncated: it has become shorter while it was read. Write it again, and start again."
            )


class ArrayWriter:
    """Fills in an array of an open file, from its first row to its last."""

    def __init__(self, file: BinaryIO, offset: int, dtype: np.dtype[Any]) -> None:
        self._file = file
        self._offset = self._start = offset
        self._dtype = dtype

    def append(self, rows: Array) -> None:
        content = _bytes_of(np.ascontiguousarray(rows, self._dtype))
        self._file.seek(self._offset)
        self._file.write(content)  # not tofile(), whose errors lack the cause
        self._offset += len(content)

    def rearrange(self, order: Array, row_shape: tuple[int, ...]) -> None:
        """Put the rows written so far into another order: row i moves to `order[i]`, (rows,)."""
        self._file.seek(self._start)
        content = self._file.read(self._offset - self._start)
        rows = np.frombuffer(content, self._dtype).reshape(len(order), *row_shape)
        moved = np.empty_like(rows)
        moved[order] = rows
        self._offset = self._start
        self.append(moved)


class ArrayFile(AbstractContextManager["ArrayFile"]):
    """A raw file that is written row after row, and then read as a `StoredArray`."""

    def __init__(self, path: Path, dtype: np.dtype[Any], row_shape: tuple[int, ...] = ()) -> None:
        self.path, self.dtype, self.row_shape = path, dtype, row_shape
        self.rows = 0
        self._file = path.open("wb", buffering=0)  # reports a full disk at once

    def append(self, rows: Array) -> None:
        """Write rows, (n, *row_shape); `PartitionError` if the disk is full."""
        left = _bytes_of(np.ascontiguousarray(rows, self.dtype))
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise PartitionError(
                f"cannot write {self.path} after {self.rows} rows ({error.strerror}); it holds a copy of the input in "
                "binary. Make room there, or name another scratch directory."
            ) from error
        self.rows += len(rows)

    def array(self) -> StoredArray:
        return StoredArray(self.path, 0, (self.rows, *self.row_shape), self.dtype)

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _bytes_of(rows: Array) -> memoryview:
    return rows.reshape(-1).view(np.uint8).data


def open_file(path: Path, advice: str = "copy it again, or write it again.") -> BinaryIO:
    """Open a file for reading; `advice` is appended to errors.

    `PartitionError` if it is missing, unreadable, or a pipe or device, which might never end.
    """

    try:
        # Without O_NONBLOCK opening a pipe would wait for a writer.
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    except (OSError, ValueError) as error:  # ValueError: an invalid file name
        raise unreadable(path, error, advice) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise PartitionError(f"{path} is a pipe or a device; expected a file; {advice}")
    return file


_CHECK_NAME = "check its name, and copy it again."


def unreadable(path: Path, error: OSError | ValueError, advice: str = _CHECK_NAME) -> PartitionError:
    """The error for an unreadable file."""
    return PartitionError(f"Cannot read {path} ({getattr(error, 'strerror', None) or error}); {advice}")


def open_npy(path: Path) -> tuple[StoredArray, bool]:
    """Open the array of an `.npy` file without reading it; also return whether it is transposed (Fortran order).

    Does not unpickle. `PartitionError` if the file is missing, truncated, not an `.npy` file, or does not contain
    numbers.
    """
    with open_file(path, _CHECK_NAME) as file:
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, transposed, dtype = read(file)
        except ValueError as error:
            raise PartitionError(f"{path} is no .npy file: {error}. Write it with numpy.save.") from error
        offset, size = file.tell(), os.fstat(file.fileno()).st_size
    if dtype.kind not in "biufc" or not shape:
        found = dtype if shape else "a single number"
        raise PartitionError(f"{path} holds {found}; expected an array of numbers with a row for each node or edge.")
    if min(shape) < 0 or math.prod(size or 1 for size in shape) * dtype.itemsize >= 2**63:
        raise PartitionError(
            f"{path} has shape {shape}, which no array can have; it is damaged. Copy or write it again."
        )
    array = StoredArray(path, offset, shape[::-1] if transposed else shape, dtype)
    expected = offset + array.shape[0] * array.row_bytes
    if size < expected:
        raise PartitionError(
            f"{path} is truncated: it has {size} bytes; expected {expected} for shape {shape} of {dtype}. "
            "Copy or write it again."
        )
    return array, transposed
