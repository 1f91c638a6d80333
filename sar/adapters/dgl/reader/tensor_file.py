"""Read DGL's tensor files (`dgl.data.utils.save_tensors`) in slices, where DGL itself reads them whole.

Layout, little-endian: magic, count, count; then for each tensor its name (length, bytes), an array header (magic, 8
reserved bytes, device, number of dimensions, dtype, shape, size in bytes) and its data.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from sar.adapters.dgl.shim import require_dgl
from sar.adapters.dgl.writer.binary_layout import ARRAY_MAGIC, CPU, TENSOR_FILE_MAGIC
from sar.errors import PartitionError
from sar.logging_setup import logger

_MAX_DIMENSIONS = 64
_SLICE_BYTES = 4 * 2**20
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


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, read in slices of rows.

    path, offset: where its values begin.
    values: the tensor itself, where DGL had to read the file; then `offset` says nothing.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor | None = None

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def slices(self) -> Iterator[tuple[int, Tensor]]:
        """Yield consecutive rows, each time with the number of the first one."""
        if self.values is not None:
            yield 0, self.values
            return
        step = max(1, _SLICE_BYTES // max(1, self.row_bytes))
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for start in range(0, self.shape[0], step):
                rows = torch.empty((min(step, self.shape[0] - start), *self.shape[1:]), dtype=self.dtype)
                if rows.numel() and file.readinto(rows.view(-1).view(torch.uint8).numpy().data) != rows.nbytes:
                    raise _truncated(self.path)
                yield start, rows


class _UnknownLayout(Exception):
    """The bytes are not laid out as this reader knows it."""


def open_tensors(path: Path) -> dict[str, StoredTensor]:
    """Find the tensors in a file without reading them.

    Where sar does not know the layout, DGL reads the file as a whole, which is logged.

    Raises:
        PartitionError: the file is missing, truncated, or DGL cannot read it either.
    """
    try:
        with path.open("rb") as file:
            return dict(_index(path, file))
    except OSError as error:
        raise PartitionError(
            f"Cannot read {path} ({error.strerror}); expected a file of features. Copy it again, or partition again."
        ) from error
    except _UnknownLayout:
        dgl = require_dgl()
    try:
        tensors = dgl.data.utils.load_tensors(str(path))
    except dgl.DGLError as error:
        raise PartitionError(f"{path} is not a DGL tensor file: {error}. Copy it again, or partition again.") from error
    logger.warning("%s has a layout that sar does not know; DGL has read it as a whole, not in slices", path)
    return {name: StoredTensor(path, 0, tuple(t.shape), t.dtype, values=t) for name, t in tensors.items()}


def load(stored: StoredTensor, device: torch.device, position: Tensor | None = None) -> Tensor:
    """Read a tensor to a device slice by slice, row i of the file to row `position[i]` of the result, if given."""
    result = torch.empty(stored.shape, dtype=stored.dtype, device=device)
    for start, rows in stored.slices():
        chunk = slice(start, start + len(rows))
        if position is None:
            result[chunk] = rows.to(device)
        else:
            result.index_copy_(0, position[chunk].to(device=device, dtype=torch.int64), rows.to(device))
    return result


def _index(path: Path, file: BinaryIO) -> Iterator[tuple[str, StoredTensor]]:
    size = path.stat().st_size

    def unpack(layout: str) -> tuple[Any, ...]:
        layout = "<" + layout
        header = file.read(struct.calcsize(layout))
        if len(header) < struct.calcsize(layout):
            raise _truncated(path)
        return struct.unpack(layout, header)

    magic, count, _ = unpack("QQQ")
    if magic != TENSOR_FILE_MAGIC:
        raise _UnknownLayout
    for _ in range(count):
        (name_bytes,) = unpack("Q")
        if name_bytes > size - file.tell():
            raise _truncated(path)
        name = file.read(name_bytes).decode()
        magic, _, device, _, ndim, code, bits, lanes = unpack("QQiiiBBH")
        known = magic == ARRAY_MAGIC and device == CPU and lanes == 1 and (code, bits) in _DTYPES
        if not known or not 1 <= ndim <= _MAX_DIMENSIONS:
            raise _UnknownLayout
        shape = unpack(f"{ndim}q")
        (data_bytes,) = unpack("q")
        stored = StoredTensor(path, file.tell(), shape, _DTYPES[code, bits])
        if data_bytes != shape[0] * stored.row_bytes:
            raise _UnknownLayout
        if data_bytes > size - stored.offset:
            raise _truncated(path)
        yield name, stored
        file.seek(data_bytes, 1)


def _truncated(path: Path) -> PartitionError:
    return PartitionError(
        f"{path} is truncated: it ends after {path.stat().st_size} bytes, in the middle of a tensor. "
        "Copy it again, or partition again."
    )
