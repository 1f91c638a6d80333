"""DGL's tensor files and graph files, read without DGL: arrays are found, and stay on disk until they are asked for.

DGL 1.1 and 2.1 write the same layout. Both kinds of files are little-endian. Every structure begins with a mark of 8
bytes; counts before lists and lengths before names have 8 bytes. An array is a header (`ARRAY_HEADER`, shape, size in
bytes) and its values in C order.

Tensor file: mark, count, count; then for each tensor its name and the array.

Graph file: a header of 4096 bytes (mark, version, kind of graphs, count); the place of the first graph; tensors of the
user's own, by name; the graphs; at the end the places of the graphs, between two copies of the size of this table. A
graph is its types' own graph (types of nodes joined by types of edges), its relations, numbers of nodes, fields of
nodes and of edges by type and name, and the types' names. A relation has a graph of its types too, once for each of
the sparse formats in which its edges are saved: mark, numbers of columns and of rows, three arrays, and bytes that say
whether they are sorted.

[Note: files are not trusted]
Whatever a file says of itself (counts, lengths, shapes) is compared with its size before anything is allocated or
repeated by it, and every number that is used as an index is compared with what it points into. So reading ends with the
content or with a `PartitionError`, in time and memory that grow with the file. Nothing is unpickled.
"""

import math
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sar.common_tuples import CanonicalEtype
from sar.errors import PartitionError
from sar.storage.arrays import BFLOAT16, StoredArray, open_file

TENSOR_FILE_MARK: Final = 0xDD5A9FBE3FA2443F
GRAPH_FILE_MARK: Final = 0xDD2E4FF046B4A13F
HETEROGRAPH_MARK: Final = 0xDD589FBE35224ABF
META_GRAPH_MARK: Final = 0xDD3C5FFE20046ABF
RELATION_MARK: Final = 0xDD2E60F0F6B4A127
COO_MARK: Final = 0xDD61FFD305DFF127
CSR_MARK: Final = 0xDD6CD31205DFF127
ARRAY_MARK: Final = 0xDD5E40F096B4A13F

GRAPH_FILE_VERSION: Final = 2
HETEROGRAPHS: Final = 2
GRAPH_FILE_HEADER_BYTES: Final = 4096

ARRAY_HEADER: Final = "QQiiiBBH"
"""Mark, 8 reserved bytes, kind and number of device, dimensions, and the dtype: code, bits, lanes (as in DLPack)."""
CPU: Final = 1

COO: Final = 1
CSR: Final = 2
CSC: Final = 4
"""Bits of the sparse formats that a relation is saved in; they follow each other in this order."""
DTYPES: Final[dict[tuple[int, int], np.dtype[Any]]] = {
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
_MAX_DIMENSIONS = 64
_ONE_FORMAT = {1: COO, 2: CSR, 3: CSC}
"""How older versions of DGL wrote which format follows."""


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

    def array(self) -> StoredArray:
        """An array's header; its values are passed by."""
        mark, _, device, _, ndim, code, bits, lanes = self.numbers(ARRAY_HEADER)
        dtype = DTYPES.get((code, bits))
        if (mark, device, lanes) != (ARRAY_MARK, CPU, 1) or dtype is None or not 1 <= ndim <= _MAX_DIMENSIONS:
            raise self.unknown(
                f"an array with the mark {mark:#x}, device {device}, {ndim} dimensions and dtype {(code, bits, lanes)}"
            )
        *shape, data_bytes = self.numbers(f"{ndim + 1}q")
        stored = StoredArray(self.path, self.at, tuple(shape), dtype)
        largest = math.prod(max(1, size) for size in shape) * dtype.itemsize  # torch multiplies sizes next to 0, too
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
        """The error for what the reader does not know."""
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
    """Find the tensors in a file without reading them.

    Raises:
        PartitionError: the file is missing, truncated, or no tensor file.
    """
    with open_file(path) as file:
        cursor = Cursor(path, file)
        cursor.mark(TENSOR_FILE_MARK, "a tensor file")
        cursor.number()
        return cursor.arrays()


class StoredEdges(NamedTuple):
    """The edges of one type on disk.

    kind: `COO`: `rows` and `columns` are sources and destinations, (E,) each. `CSR`: `rows` are offsets into `columns`,
        (num_rows + 1,). `CSC`: as `CSR`, with destinations for rows.
    edge_ids: (E,) the edge ID of each entry; (0,) where entries are in the order of IDs.
    """

    kind: int
    num_rows: int
    num_columns: int
    rows: StoredArray
    columns: StoredArray
    edge_ids: StoredArray

    @property
    def num_edges(self) -> int:
        return self.columns.shape[0]

    def ends(self) -> tuple[Tensor, Tensor]:
        """Read sources and destinations in the order of edge IDs, (E,) each.

        Raises:
            PartitionError: they are outside of the graph, or edge IDs are not 0 to E - 1, each once.
        """
        columns = self._read(self.columns, self.num_edges, self.num_columns)
        if self.kind == COO:
            rows = self._read(self.rows, self.num_edges, self.num_rows)
        else:
            offsets = self._read(self.rows, self.num_rows + 1, self.num_edges + 1)
            degrees = offsets.diff()
            if int(offsets[0]) != 0 or int(offsets[-1]) != self.num_edges or bool((degrees < 0).any()):
                raise self._damaged("offsets that do not ascend from 0 to the number of edges")
            rows = torch.arange(self.num_rows, dtype=offsets.dtype).repeat_interleave(degrees)
        if self.edge_ids.shape != (0,):
            rows, columns = self._by_edge_id(rows, columns)
        return (columns, rows) if self.kind == CSC else (rows, columns)

    def _by_edge_id(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        edge_ids = self._read(self.edge_ids, self.num_edges, self.num_edges).long()
        entry_of = torch.full((self.num_edges,), -1)
        entry_of[edge_ids] = torch.arange(self.num_edges)
        if bool((entry_of < 0).any()):
            raise self._damaged("edge IDs that are not each there once")
        return rows[entry_of], columns[entry_of]

    def _read(self, stored: StoredArray, count: int, limit: int) -> Tensor:
        """Whole numbers, (count,), from 0 to below `limit`."""
        if stored.shape != (count,) or stored.tensor_dtype not in (torch.int32, torch.int64):
            raise self._damaged(f"{stored.tensor_dtype} of shape {stored.shape} for {count} indices")
        numbers = stored.load()
        if count and not 0 <= int(numbers.min()) <= int(numbers.max()) < limit:
            raise self._damaged(f"indices from {int(numbers.min())} to {int(numbers.max())} below {limit}")
        return numbers

    def _damaged(self, found: str) -> PartitionError:
        return PartitionError(
            f"{self.columns.path} has {found}: its graph is damaged. Copy it again, or write it again."
        )


class Relation(NamedTuple):
    """The edges of one type, and their fields."""

    etype: CanonicalEtype
    edges: StoredEdges
    fields: dict[str, StoredArray]


class StoredGraph(NamedTuple):
    """A graph on disk: numbers of nodes and their fields by type, and what joins them."""

    path: Path
    num_nodes: dict[str, int]
    fields: dict[str, dict[str, StoredArray]]
    relations: list[Relation]


def open_graph(path: Path) -> StoredGraph:
    """Find the only graph of a file; its values are not read.

    Raises:
        PartitionError: the file is missing or damaged, or holds another number of graphs.
    """
    with open_file(path) as file:
        cursor = Cursor(path, file)
        start, end = _place(cursor)
        _check_header(cursor)
        cursor.move(start)
        graph = _graph(cursor)
        if cursor.at != end:
            raise cursor.unknown(f"a graph that does not end where the table of graphs begins, at byte {end}")
        return graph


def _place(cursor: Cursor) -> tuple[int, int]:
    """Where the graph begins and ends, by the table at the end of the file, which a truncated one lacks."""
    if cursor.size >= GRAPH_FILE_HEADER_BYTES + 24:
        cursor.move(cursor.size - 8)
        table_bytes = cursor.number()
        end = cursor.size - 16 - table_bytes
        if end >= GRAPH_FILE_HEADER_BYTES and table_bytes >= 8:
            cursor.move(end)
            size_again, count = cursor.numbers("QQ")
            if size_again == table_bytes == 8 * (count + 1):
                if count != 1:
                    raise PartitionError(f"{cursor.path} holds {count} graphs; expected one. Save that graph alone.")
                start = cursor.number()
                if not GRAPH_FILE_HEADER_BYTES <= start < end:
                    raise cursor.unknown(f"a graph at byte {start}")
                return start, end
    raise PartitionError(
        f"{cursor.path} is truncated, or no DGL graph file: its {cursor.size} bytes do not end with a table of graphs. "
        "Copy it again, or write it again."
    )


def _check_header(cursor: Cursor) -> None:
    cursor.move(0)
    cursor.mark(GRAPH_FILE_MARK, "a graph file")
    version, kind = cursor.numbers("QQ")
    if (version, kind) != (GRAPH_FILE_VERSION, HETEROGRAPHS):
        raise cursor.unknown(f"graphs of version {version} and kind {kind}")


def _graph(cursor: Cursor) -> StoredGraph:
    cursor.mark(HETEROGRAPH_MARK, "a graph")
    joined = _type_graph(cursor)
    edges = [_edges(cursor) for _ in range(cursor.number())]
    num_nodes = [cursor.number() for _ in range(cursor.number())]
    node_fields = [cursor.arrays() for _ in range(cursor.number())]
    edge_fields = [cursor.arrays() for _ in range(cursor.number())]
    ntypes, etypes = ([cursor.text() for _ in range(cursor.number())] for _ in range(2))
    src_types, dst_types = ([ntypes[end] for end in ends.tolist() if end < len(ntypes)] for ends in joined.ends())
    names = list(zip(src_types, etypes, dst_types))  # noqa: B905  compared below
    of_nodes = joined.num_rows, joined.num_columns, len(num_nodes), len(node_fields), len(set(ntypes)), len(ntypes)
    of_edges = joined.num_edges, len(edges), len(edge_fields), len(etypes), len(set(names))
    if len(set(of_nodes)) > 1 or len(set(of_edges)) > 1:
        raise cursor.unknown(f"lists of {of_nodes} types of nodes and {of_edges} types of edges, all in one graph")
    counts = dict(zip(ntypes, num_nodes, strict=True))
    for (src_type, _, dst_type), of_type in zip(names, edges, strict=True):
        sizes = (of_type.num_columns, of_type.num_rows) if of_type.kind == CSC else of_type[1:3]
        if sizes != (counts[src_type], counts[dst_type]):
            raise cursor.unknown(f"edges between {sizes} nodes of {counts}")
    relations = [Relation(*of_type) for of_type in zip(names, edges, edge_fields, strict=True)]
    owners = [*zip(num_nodes, node_fields, strict=True), *((of.edges.num_edges, of.fields) for of in relations)]
    for count, fields in owners:
        for name, stored in fields.items():
            if stored.shape[0] != count:
                raise cursor.unknown(f"a field {name!r} of shape {stored.shape} for {count} nodes or edges")
    return StoredGraph(cursor.path, counts, dict(zip(ntypes, node_fields, strict=True)), relations)


def _edges(cursor: Cursor) -> StoredEdges:
    """The edges of one type; in the first one, where they are saved in several sparse formats."""
    cursor.mark(RELATION_MARK, "a relation")
    saved, are_bits, _, _ = cursor.numbers("4i")
    bits = saved if are_bits else _ONE_FORMAT.get(saved, 0)
    if bits not in range(1, (COO | CSR | CSC) + 1):
        raise cursor.unknown(f"edges in the sparse formats {saved}")
    found = []
    for kind in (COO, CSR, CSC):
        if kind & bits:
            _type_graph(cursor)
            found.append(_sparse(cursor, kind))
    return found[0]


def _type_graph(cursor: Cursor) -> StoredEdges:
    """What joins the types of nodes."""
    cursor.mark(META_GRAPH_MARK, "the graph of types")
    return _sparse(cursor, CSR)


def _sparse(cursor: Cursor, kind: int) -> StoredEdges:
    cursor.mark(COO_MARK if kind == COO else CSR_MARK, "edges")
    num_columns, num_rows = cursor.numbers("QQ")
    rows, columns, edge_ids = cursor.array(), cursor.array(), cursor.array()
    cursor.numbers("??" if kind == COO else "?")  # whether they are sorted
    return StoredEdges(kind, num_rows, num_columns, rows, columns, edge_ids)
