"""A way through the numbers, names and array headers of a file that may be damaged, or made to do harm.

[Note: files are not trusted]
Whatever a file says of itself (counts, lengths, shapes) is compared with its size before anything is allocated or
repeated by it, and every number that is used as an index is compared with what it points into. So reading ends with the
content or with a `PartitionError`, in time and memory that grow with the file. Nothing is unpickled.
"""

import math
import os
import struct
from pathlib import Path
from typing import BinaryIO

import torch

from sar.errors import PartitionError
from sar.storage.file_layout import ARRAY_HEADER, ARRAY_MARK, CPU
from sar.storage.stored_tensor import StoredTensor, truncated

_MAX_DIMENSIONS = 64
_DTYPES = {  # (code, bits) as in DLPack
    (0, 8): torch.int8,
    (0, 16): torch.int16,
    (0, 32): torch.int32,
    (0, 64): torch.int64,
    (1, 8): torch.uint8,
    (2, 16): torch.float16,
    (2, 32): torch.float32,
    (2, 64): torch.float64,
    (4, 16): torch.bfloat16,
    (5, 64): torch.complex64,
    (5, 128): torch.complex128,
}


class Cursor:
    """Goes through an open file, and never beyond its end; see [Note: files are not trusted].

    Every method raises `PartitionError` where the file ends, or has something else than asked for.
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

    def array(self) -> StoredTensor:
        """An array's header; its values are passed by."""
        mark, _, device, _, ndim, code, bits, lanes = self.numbers(ARRAY_HEADER)
        dtype = _DTYPES.get((code, bits))
        if (mark, device, lanes) != (ARRAY_MARK, CPU, 1) or dtype is None or not 1 <= ndim <= _MAX_DIMENSIONS:
            raise self.unknown(
                f"an array with the mark {mark:#x}, device {device}, {ndim} dimensions and dtype {(code, bits, lanes)}"
            )
        *shape, data_bytes = self.numbers(f"{ndim + 1}q")
        stored = StoredTensor(self.path, self.at, tuple(shape), dtype)
        largest = math.prod(max(1, size) for size in shape) * dtype.itemsize  # torch multiplies sizes next to 0, too
        if min(shape) < 0 or largest >= 2**63 or data_bytes != shape[0] * stored.row_bytes:
            raise self.unknown(f"an array of shape {tuple(shape)} in {data_bytes} bytes")
        if data_bytes > self.size - self.at:
            raise truncated(self.path)
        self._file.seek(data_bytes, os.SEEK_CUR)
        return stored

    def arrays(self) -> dict[str, StoredTensor]:
        """A list of arrays by name."""
        return {self.text(): self.array() for _ in range(self.number())}

    def unknown(self, found: str) -> PartitionError:
        """The error for what the reader does not know."""
        return PartitionError(
            f"{self.path} has {found}, before byte {self.at}; expected the layout of DGL 1.1 and 2.1. The file is "
            "damaged, or from another version: copy it again, or write it again."
        )

    def _take(self, count: int) -> bytes:
        content = self._file.read(count) if count <= self.size - self.at else b""
        if len(content) < count:
            raise truncated(self.path)
        return content
