"""The bytes around the arrays in DGL's tensor files and graph files, so that these can be written in pieces.

DGL writes both from memory at once. Here a file is laid out first, with room for every array; whoever has the values
fills them in, a few rows at a time (`Room`). DGL 1.1 and 2.1 read and write the same layout.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sar.errors import ConfigError

Array = NDArray[Any]

TENSOR_FILE_MAGIC = 0xDD5A9FBE3FA2443F
ARRAY_MAGIC = 0xDD5E40F096B4A13F
CPU = 1
_GRAPH_FILE_MAGIC = 0xDD2E4FF046B4A13F
_HETEROGRAPH_MAGIC = 0xDD589FBE35224ABF
_META_GRAPH_MAGIC = 0xDD3C5FFE20046ABF
_CSR_MAGIC = 0xDD6CD31205DFF127
_RELATION_MAGIC = 0xDD2E60F0F6B4A127
_COO_MAGIC = 0xDD61FFD305DFF127
_FILE_HEADER_BYTES = 4096
_NO_ROWS = np.zeros(0, np.int64)
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5}  # of DLPack
_READABLE = {"i1", "i2", "i4", "i8", "u1", "f2", "f4", "f8", "c8", "c16"}


class Form(NamedTuple):
    """What is to be known of an array before its values are."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])


class Room:
    """Where an array goes in an open file; it is filled from its first row to its last."""

    def __init__(self, file: BinaryIO, offset: int, dtype: np.dtype[Any]) -> None:
        self._file, self._offset, self._dtype = file, offset, dtype

    def append(self, rows: Array) -> None:
        """Fill in the next rows."""
        rows = np.ascontiguousarray(rows, self._dtype)
        if rows.size:
            self._file.seek(self._offset)
            self._file.write(rows.reshape(-1).view(np.uint8).data)  # not tofile(), whose errors do not say why
            self._offset += rows.nbytes


@dataclass(frozen=True)
class Layout:
    """A file's bytes but for the values of its arrays.

    pieces: what lies between the arrays, by offset.
    offsets: of every array, by name.
    size: of the file.
    """

    pieces: Mapping[int, bytes]
    offsets: Mapping[str, int]
    size: int

    def write(self, path: Path) -> None:
        """Make the file, or make it anew, with zeros for the values."""
        with path.open("wb") as file:
            for offset, piece in self.pieces.items():
                file.seek(offset)
                file.write(piece)
            file.truncate(self.size)


def stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type as which DGL's files hold a field: little-endian, and uint8 for bool, like DGL.

    Raises:
        ConfigError: they cannot.
    """
    if dtype.kind == "b":
        return np.dtype(np.uint8)
    if f"{dtype.kind}{dtype.itemsize}" not in _READABLE:
        raise ConfigError(f"its type is {dtype}; expected uint8, signed integers, floats of up to 64 bits, or bool.")
    return np.dtype(f"<{dtype.kind}{dtype.itemsize}")


def tensor_file_layout(forms: Mapping[str, Form]) -> Layout:
    """A file of tensors by name, as `dgl.data.utils.load_tensors` reads it."""
    layout = _Growing()
    layout.add(struct.pack("<QQQ", TENSOR_FILE_MAGIC, len(forms), len(forms)))
    for name, form in forms.items():
        layout.add(_text(name))
        layout.leave_room(name, form)
    return layout.done()


def graph_file_layout(
    num_nodes: int, num_edges: int, node_fields: Mapping[str, type], edge_fields: Mapping[str, type]
) -> Layout:
    """A file of one homogeneous graph, as `dgl.load_graphs` reads it.

    The rooms are named `src`, `dst`, `node/FIELD` and `edge/FIELD`, for an entry each per node or edge.
    """
    layout = _Growing()
    heterograph_at = _FILE_HEADER_BYTES + 16
    layout.add(struct.pack("<QQQQ", _GRAPH_FILE_MAGIC, 2, 2, 1).ljust(_FILE_HEADER_BYTES, b"\0"))  # version, kind, one
    layout.add(struct.pack("<QQ", heterograph_at, 0))  # no labels
    one_type = struct.pack("<QQQQ", _META_GRAPH_MAGIC, _CSR_MAGIC, 1, 1)
    one_type += b"".join(array_header(Form(np.dtype("<i8"), (len(v),))) + _integers(*v) for v in ([0, 1], [0], [0]))
    one_type += b"\0"  # not sorted
    layout.add(struct.pack("<Q", _HETEROGRAPH_MAGIC) + one_type)
    layout.add(struct.pack("<QQiiii", 1, _RELATION_MAGIC, 1, 1, 7, 1))  # one relation, in COO; any form may be made
    layout.add(one_type + struct.pack("<QQQ", _COO_MAGIC, num_nodes, num_nodes))
    for end in ("src", "dst"):
        layout.leave_room(end, Form(np.dtype("<i8"), (num_edges,)))
    layout.add(array_header(Form(np.dtype("<i8"), (0,))) + b"\0\0")  # edges are in order; neither end is sorted
    layout.add(_integers(1, num_nodes))
    for kind, count, fields in (("node", num_nodes, node_fields), ("edge", num_edges, edge_fields)):
        layout.add(_integers(1, len(fields)))
        for name, dtype in fields.items():
            layout.add(_text(name))
            layout.leave_room(f"{kind}/{name}", Form(np.dtype(dtype).newbyteorder("<"), (count,)))
    layout.add(_integers(1) + _text("_N") + _integers(1) + _text("_E"))
    layout.add(_integers(16, 1, heterograph_at, 16))  # the table of graphs between its sizes
    return layout.done()


def array_header(form: Form) -> bytes:
    """What precedes an array's values."""
    code, bits = _CODES[form.dtype.kind], 8 * form.dtype.itemsize
    head = struct.pack("<QQiiiBBH", ARRAY_MAGIC, 0, CPU, 0, len(form.shape), code, bits, 1)
    return head + _integers(*form.shape, form.row_bytes * form.shape[0])


class _Growing:
    """A layout in the making."""

    def __init__(self) -> None:
        self._pieces: dict[int, bytes] = {}
        self._offsets: dict[str, int] = {}
        self._size = 0

    def add(self, piece: bytes) -> None:
        self._pieces[self._size] = piece
        self._size += len(piece)

    def leave_room(self, name: str, form: Form) -> None:
        self.add(array_header(form))
        self._offsets[name] = self._size
        self._size += form.row_bytes * form.shape[0]

    def done(self) -> Layout:
        return Layout(self._pieces, self._offsets, self._size)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _integers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)
