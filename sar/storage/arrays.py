"""Arrays in files, of which slices are read: `.npy`, raw and DGL tensor files, and scratch files.

Rows are read, not memory-mapped: pages of a mapping would count as memory of the process until the system takes them
back, so that a stream through a large file would look like the whole file.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sar.errors import PartitionError
from sar.storage.stored_tensor import StoredTensor

Array = NDArray[Any]

_SPAN_BYTES = 32 << 20  # of a file, read at a time


@dataclass(frozen=True)
class StoredArray:
    """A column in a file: rows of equal size, in C order.

    path: the file.
    offset: bytes before the first row.
    shape: (rows, ...).
    stored: dtype in the file, in either byte order; rows come in the machine's.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    stored: np.dtype[Any]

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """What rows come in."""
        native: np.dtype[Any] = self.stored.newbyteorder("=")
        return native

    @cached_property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.stored.itemsize

    def __getitem__(self, rows: Any, /) -> Array:
        """The rows of a slice without a step, or of an ascending array of row numbers."""
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(self.shape[0])
            return self._read(start, max(0, stop - start))
        return self._take(np.asarray(rows))

    def _read(self, start: int, count: int) -> Array:
        items = count * math.prod(self.shape[1:])
        values = np.fromfile(self.path, self.stored, items, offset=self.offset + start * self.row_bytes)
        if len(values) < items:
            raise PartitionError(f"{self.path} has become shorter while it was read. Write it again, and start again.")
        return values.reshape(count, *self.shape[1:]).astype(self.dtype, copy=False)

    def _take(self, rows: Array) -> Array:
        """Rows picked from one stretch of the file after the other."""
        result = np.empty((len(rows), *self.shape[1:]), self.dtype)
        span = max(1, _SPAN_BYTES // max(1, self.row_bytes))
        done = 0
        while done < len(rows) and self.row_bytes:
            first = int(rows[done])
            until = int(np.searchsorted(rows, first + span))
            stretch = self._read(first, int(rows[until - 1]) + 1 - first)
            result[done:until] = stretch[rows[done:until] - first]
            done = until
        return result


def open_npy(path: Path) -> tuple[StoredArray, bool]:
    """Find the array in an `.npy` file without reading it; nothing is unpickled.

    Returns:
        The array as it lies in the file, and whether that is the transpose of what was saved (Fortran order).

    Raises:
        PartitionError: the file is missing, truncated, no `.npy` file, or holds other things than numbers.
    """
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, transposed, dtype = read(file)
            offset, size = file.tell(), path.stat().st_size
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise PartitionError(f"{path} is no .npy file: {error}. Write it with numpy.save.") from error
    if dtype.kind not in "biufc" or not shape:
        found = dtype if shape else "a single number"
        raise PartitionError(f"{path} holds {found}; expected an array of numbers with a row for each node or edge.")
    array = StoredArray(path, offset, shape[::-1] if transposed else shape, dtype)
    expected = offset + array.shape[0] * array.row_bytes
    if size < expected:
        raise PartitionError(
            f"{path} is truncated: it has {size} bytes; expected {expected} for shape {shape} of {dtype}. "
            "Copy or write it again."
        )
    return array, transposed


def tensor_column(tensor: StoredTensor, name: str | None = None) -> StoredArray:
    """A tensor of one of DGL's files as a column, read where it lies; its name is for the error.

    Raises:
        PartitionError: it is bfloat16.
    """
    if tensor.dtype == torch.bfloat16:
        what = tensor.path if name is None else f"the field {name!r} in {tensor.path}"
        raise PartitionError(f"{what} is bfloat16, which numpy lacks; expected float16, float32 or another type.")
    dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    return StoredArray(tensor.path, tensor.offset, tensor.shape, dtype)


def open_raw(path: Path, dtype: np.dtype[Any], row_shape: tuple[int, ...] = ()) -> StoredArray:
    """Rows of a file that has nothing else in it.

    Raises:
        PartitionError: the file is missing, or its size is no number of rows.
    """
    row_bytes = math.prod(row_shape) * dtype.itemsize
    try:
        size = path.stat().st_size
    except OSError as error:
        raise unreadable(path, error) from error
    if size % row_bytes:
        raise PartitionError(
            f"{path} has {size} bytes, which is no multiple of {row_bytes}, a row of {math.prod(row_shape)} {dtype}: "
            "it is truncated, or of another dtype. Copy it again, or name the dtype."
        )
    return StoredArray(path, 0, (size // row_bytes, *row_shape), dtype)


def unreadable(path: Path, error: OSError) -> PartitionError:
    """The error for a file that the system does not let us read."""
    return PartitionError(f"cannot read {path} ({error.strerror or error}); check its name, and copy it again.")


class ArrayFile:
    """A raw file that is written row after row, and then read as a `StoredArray`; a context manager."""

    def __init__(self, path: Path, dtype: np.dtype[Any], row_shape: tuple[int, ...] = ()) -> None:
        self.path, self.dtype, self.row_shape = path, dtype, row_shape
        self.rows = 0
        self._file = path.open("wb", buffering=0)  # so that a full disk shows at once

    def append(self, rows: Array) -> None:
        """Write rows, (n, *row_shape).

        Raises:
            PartitionError: the disk is full.
        """
        left = np.ascontiguousarray(rows, self.dtype).reshape(-1).view(np.uint8).data
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
        """What was written."""
        return StoredArray(self.path, 0, (self.rows, *self.row_shape), self.dtype)

    def __enter__(self) -> "ArrayFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
