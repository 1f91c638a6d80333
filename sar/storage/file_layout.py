"""Writing DGL's tensor files and graph files in pieces; `dgl_files.py` says what they look like.

DGL writes both from memory at once. Here a file is laid out first, with space for every array; whoever has the values
fills them in, a few rows at a time (`ArrayWriter`).
"""

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from sar.errors import ConfigError
from sar.storage.arrays import BFLOAT16, ArrayWriter
from sar.storage.dgl_files import (
    ARRAY_HEADER,
    ARRAY_MARK,
    COO,
    COO_MARK,
    CPU,
    CSC,
    CSR,
    CSR_MARK,
    DTYPES,
    GRAPH_FILE_HEADER_BYTES,
    GRAPH_FILE_MARK,
    GRAPH_FILE_VERSION,
    HETEROGRAPH_MARK,
    HETEROGRAPHS,
    META_GRAPH_MARK,
    RELATION_MARK,
    TENSOR_FILE_MARK,
)

_INT64 = np.dtype("<i8")
_CODES = {dtype: code for code, dtype in DTYPES.items() if dtype != BFLOAT16}


class ArraySpec(NamedTuple):
    """What is known of an array before its values are."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def nbytes(self) -> int:
        return self.row_bytes * self.shape[0]


class FileLayout:
    """A file's bytes but for the values of its arrays."""

    def __init__(self) -> None:
        self._pieces: dict[int, bytes] = {}  # what lies between the arrays, by offset
        self._arrays: dict[str, tuple[int, np.dtype[Any]]] = {}  # offset and type by name
        self._size = 0

    def add(self, piece: bytes) -> None:
        self._pieces[self._size] = piece
        self._size += len(piece)

    def add_array(self, name: str, spec: ArraySpec) -> None:
        """Append the header of an array, and space for its values."""
        self.add(array_header(spec))
        self._arrays[name] = self._size, spec.dtype
        self._size += spec.nbytes

    def create(self, path: Path) -> None:
        """Make the file, or make it anew, with zeros for the values."""
        with path.open("wb") as file:
            for offset, piece in self._pieces.items():
                file.seek(offset)
                file.write(piece)
            file.truncate(self._size)

    def writer(self, file: BinaryIO, name: str) -> ArrayWriter:
        """What fills in one array of the created file, opened for reading and writing."""
        offset, dtype = self._arrays[name]
        return ArrayWriter(file, offset, dtype)


def stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type as which DGL's files hold a field: little-endian, and uint8 for bool, like DGL.

    Raises:
        ConfigError: they cannot.
    """
    stored = np.dtype(np.uint8) if dtype.kind == "b" else dtype.newbyteorder("<")
    if stored not in _CODES:
        raise ConfigError(f"its type is {dtype}; expected uint8, signed integers, floats of up to 64 bits, or bool.")
    return stored


def tensor_file_layout(specs: Mapping[str, ArraySpec]) -> FileLayout:
    """A file of tensors by name, as `dgl.data.utils.load_tensors` reads it."""
    layout = FileLayout()
    layout.add(struct.pack("<QQQ", TENSOR_FILE_MARK, len(specs), len(specs)))
    for name, spec in specs.items():
        layout.add(_text(name))
        layout.add_array(name, spec)
    return layout


def graph_file_layout(
    num_nodes: int, num_edges: int, node_fields: Mapping[str, type], edge_fields: Mapping[str, type]
) -> FileLayout:
    """A file of one homogeneous graph, as `dgl.load_graphs` reads it.

    The arrays are named `src`, `dst`, `node/FIELD` and `edge/FIELD`, with an entry for each node or edge.
    """
    layout = FileLayout()
    heterograph_at = GRAPH_FILE_HEADER_BYTES + 16
    header = struct.pack("<QQQQ", GRAPH_FILE_MARK, GRAPH_FILE_VERSION, HETEROGRAPHS, 1)
    layout.add(header.ljust(GRAPH_FILE_HEADER_BYTES, b"\0"))
    layout.add(struct.pack("<QQ", heterograph_at, 0))  # no labels
    one_type = struct.pack("<QQQQ", META_GRAPH_MARK, CSR_MARK, 1, 1)
    for values in ([0, 1], [0], [0]):
        one_type += array_header(ArraySpec(_INT64, (len(values),))) + _integers(*values)
    one_type += b"\0"  # not sorted
    layout.add(struct.pack("<Q", HETEROGRAPH_MARK) + one_type)
    layout.add(struct.pack("<QQiiii", 1, RELATION_MARK, COO, 1, COO | CSR | CSC, 1))  # COO is here; DGL may make any
    layout.add(one_type + struct.pack("<QQQ", COO_MARK, num_nodes, num_nodes))
    for end in ("src", "dst"):
        layout.add_array(end, ArraySpec(_INT64, (num_edges,)))
    layout.add(array_header(ArraySpec(_INT64, (0,))) + b"\0\0")  # edges are in order; neither end is sorted
    layout.add(_integers(1, num_nodes))
    for kind, count, fields in (("node", num_nodes, node_fields), ("edge", num_edges, edge_fields)):
        layout.add(_integers(1, len(fields)))
        for name, dtype in fields.items():
            layout.add(_text(name))
            layout.add_array(f"{kind}/{name}", ArraySpec(np.dtype(dtype).newbyteorder("<"), (count,)))
    layout.add(_integers(1) + _text("_N") + _integers(1) + _text("_E"))
    layout.add(_integers(16, 1, heterograph_at, 16))  # the table of graphs between its sizes
    return layout


def array_header(spec: ArraySpec) -> bytes:
    """What precedes an array's values."""
    code, bits = _CODES[spec.dtype]
    head = struct.pack(f"<{ARRAY_HEADER}", ARRAY_MARK, 0, CPU, 0, len(spec.shape), code, bits, 1)
    return head + _integers(*spec.shape, spec.nbytes)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _integers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)
