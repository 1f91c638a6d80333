"""Reads and writes DGL's tensor files (`dgl.data.utils.save_tensors`), and arrays in its other files, without DGL.

DGL 1.1 and 2.1 write the same layout, and read and write whole files. We locate arrays, and read their values on
demand. To write a file, we first lay it out with space for every array, and then fill in values a few rows at a time.

Files are little-endian. Every structure begins with a mark of 8 bytes; counts before lists and lengths before names
have 8 bytes. An array is a header (`_ARRAY_HEADER`, shape, size in bytes) and its values in C order. A tensor file is:
mark, count, count; then for each tensor its name and the array.

[Note: files are not trusted]
Counts, lengths and shapes in a file are compared with its size before they determine an allocation or a loop, and every
index is checked against the size of its target. So reading ends with the content or with a `PartitionError`, in time
and memory proportional to the file. Nothing is unpickled.
"""

import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np

from sar.data.arrays import BFLOAT16, ArrayWriter, StoredArray, open_file
from sar.errors import ConfigError, PartitionError

TENSOR_FILE_MARK: Final = 0xDD5A9FBE3FA2443F
ARRAY_MARK: Final = 0xDD5E40F096B4A13F
_ARRAY_HEADER = "QQiiiBBH"
"""Mark, 8 reserved bytes, kind and number of device, dimensions, and the dtype: code, bits, lanes (as in DLPack)."""
_CPU = 1
_MAX_DIMENSIONS = 64
_DTYPES: dict[tuple[int, int], np.dtype[Any]] = {
    (0, 8): np.dtype("<i1"),
    (0, 16): np.dtype("<i2"),
    (0, 32): np.dtype("<i4"),
    (0, 64): np.dtype("<i8"),
    (1, 8): np.dtype("<u1"),
    (2, 16): np.dtype("<f2"),
    (2, 32): np.dtype("<f4"),
    (2, 64): np.dtype("<f8"),
    (4, 16): BFLOAT16,
    (5, 64): np.dtype("<c8"),
    (5, 128): np.dtype("<c16"),
}
"""By code and bits, as in DLPack."""
_CODES = {dtype: code for code, dtype in _DTYPES.items() if dtype != BFLOAT16}


class Cursor:
    """Reads an open file sequentially, never beyond its end; see [Note: files are not trusted].

    Every method raises `PartitionError` if the file ends or has other content.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.size = os.fstat(file.fileno()).st_size
        self._file = file

    @property
    def at(self) -> int:
        return self._file.tell()

    def move(self, to: int) -> None:
        self._file.seek(to)

    def numbers(self, layout: str) -> tuple[int, ...]:
        """Numbers by their codes in `struct`."""
        layout = f"<{layout}"
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def number(self) -> int:
        """A count, a length or a place."""
        return self.numbers("Q")[0]

    def mark(self, expected: int, what: str) -> None:
        found = self.number()
        if found != expected:
            raise self.unknown(f"{found:#x} where the mark of {what} should be")

    def text(self) -> str:
        try:
            return self._take(self.number()).decode()
        except UnicodeDecodeError as error:
            raise self.unknown("a name that is not UTF-8") from error

    def array(self) -> StoredArray:
        """Read an array's header, and skip its values."""
        mark, _, device, _, ndim, code, bits, lanes = self.numbers(_ARRAY_HEADER)
        dtype = _DTYPES.get((code, bits))
        if (mark, device, lanes) != (ARRAY_MARK, _CPU, 1) or dtype is None or not 1 <= ndim <= _MAX_DIMENSIONS:
            raise self.unknown(
                f"an array with the mark {mark:#x}, device {device}, {ndim} dimensions and dtype {(code, bits, lanes)}"
            )
        *shape, data_bytes = self.numbers(f"{ndim + 1}q")
        stored = StoredArray(self.path, self.at, tuple(shape), dtype)
        largest = math.prod(max(1, size) for size in shape) * dtype.itemsize  # torch does the same with sizes of 0
        if min(shape) < 0 or largest >= 2**63 or data_bytes != shape[0] * stored.row_bytes:
            raise self.unknown(f"an array of shape {tuple(shape)} in {data_bytes} bytes")
        if data_bytes > self.size - self.at:
            raise self._truncated()
        self._file.seek(data_bytes, os.SEEK_CUR)
        return stored

    def arrays(self) -> dict[str, StoredArray]:
        """A list of arrays by name."""
        return {self.text(): self.array() for _ in range(self.number())}

    def unknown(self, found: str) -> PartitionError:
        """The error for a format that the reader does not know."""
        return PartitionError(
            f"{self.path} has {found}, before byte {self.at}; expected the layout of DGL 1.1 and 2.1. The file is "
            "damaged, or from another version: copy it again, or write it again."
        )

    def _take(self, count: int) -> bytes:
        content = self._file.read(count) if count <= self.size - self.at else b""
        if len(content) < count:
            raise self._truncated()
        return content

    def _truncated(self) -> PartitionError:
        return PartitionError(
            f"{self.path} is truncated: it ends after {self.size} bytes, in the middle of a tensor. Copy it again, or "
            "write it again."
        )


def open_tensors(path: Path) -> dict[str, StoredArray]:
    """Find the tensors in a file, or raise `PartitionError` if it is missing, truncated, or no tensor file."""
    with open_file(path) as file:
        cursor = Cursor(path, file)
        cursor.mark(TENSOR_FILE_MARK, "a tensor file")
        cursor.number()
        return cursor.arrays()


class ArraySpec(NamedTuple):
    """The dtype and shape of an array whose values are not known yet."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def nbytes(self) -> int:
        return self.row_bytes * self.shape[0]


class FileLayout:
    """The bytes of a file except the values of its arrays. Methods that append are named as in `Cursor`."""

    def __init__(self) -> None:
        self._pieces: dict[int, bytes] = {}  # bytes between the arrays, by offset
        self._arrays: dict[str, tuple[int, np.dtype[Any]]] = {}  # offset and type by name
        self._size = 0

    def numbers(self, layout: str, *numbers: int) -> None:
        """Append numbers by their codes in `struct`."""
        self._add(struct.pack(f"<{layout}", *numbers))

    def text(self, text: str) -> None:
        self.numbers("Q", len(text.encode()))
        self._add(text.encode())

    def zeros(self, until: int) -> None:
        """Fill the file with zeros up to an offset."""
        self._size = until

    def array(self, name: str, spec: ArraySpec) -> None:
        """Append the header of an array, and space for its values."""
        self._header(spec)
        self._arrays[name] = self._size, spec.dtype
        self._size += spec.nbytes

    def integers(self, *values: int) -> None:
        """Append an array of these values."""
        self._header(ArraySpec(np.dtype("<i8"), (len(values),)))
        self.numbers(f"{len(values)}q", *values)

    def _header(self, spec: ArraySpec) -> None:
        code, bits = _CODES[spec.dtype]
        self.numbers(_ARRAY_HEADER, ARRAY_MARK, 0, _CPU, 0, len(spec.shape), code, bits, 1)
        self.numbers(f"{len(spec.shape) + 1}q", *spec.shape, spec.nbytes)

    def _add(self, piece: bytes) -> None:
        self._pieces[self._size] = piece
        self._size += len(piece)

    def create(self, path: Path) -> None:
        """Create or overwrite the file, with zeros for the values."""
        with path.open("wb") as file:
            for offset, piece in self._pieces.items():
                file.seek(offset)
                file.write(piece)
            file.truncate(self._size)

    def writer(self, file: BinaryIO, name: str, skip: int = 0) -> ArrayWriter:
        """A writer of one array of the created file, opened for reading and writing, but for its first bytes."""
        offset, dtype = self._arrays[name]
        return ArrayWriter(file, offset + skip, dtype)


def tensor_file_layout(specs: Mapping[str, ArraySpec]) -> FileLayout:
    """The layout of a file of tensors by name, for `dgl.data.utils.load_tensors`."""
    layout = FileLayout()
    layout.numbers("QQQ", TENSOR_FILE_MARK, len(specs), len(specs))
    for name, spec in specs.items():
        layout.text(name)
        layout.array(name, spec)
    return layout


def stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of a field in DGL's files: little-endian, and uint8 for bool; `ConfigError` if not supported."""
    stored = np.dtype(np.uint8) if dtype.kind == "b" else dtype.newbyteorder("<")
    if stored not in _CODES:
        raise ConfigError(f"its type is {dtype}; expected uint8, signed integers, floats of up to 64 bits, or bool.")
    return stored
