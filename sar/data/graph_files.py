"""Reads and writes DGL's graph files (`dgl.save_graphs`) without DGL, as `tensor_files.py` does with tensors.

A graph file is: a header of 4096 bytes (mark, version, kind of graphs, count); the position of the first graph; the
user's tensors by name; the graphs; finally the positions of the graphs, between two copies of the size of this table.

A graph is its metagraph (node types connected by edge types), its relations, numbers of nodes, fields of
nodes and of edges by type and name, and the types' names. A relation is, for each stored sparse format:
the metagraph again, mark, numbers of columns and of rows, three arrays, and bytes that tell if they are sorted.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from sar.common_tuples import CanonicalEtype
from sar.data.arrays import Array, StoredArray, open_file
from sar.data.tensor_files import ArraySpec, Cursor, FileLayout
from sar.errors import PartitionError

GRAPH_FILE_MARK: Final = 0xDD2E4FF046B4A13F
HETEROGRAPH_MARK: Final = 0xDD589FBE35224ABF
META_GRAPH_MARK: Final = 0xDD3C5FFE20046ABF
RELATION_MARK: Final = 0xDD2E60F0F6B4A127
COO_MARK: Final = 0xDD61FFD305DFF127
CSR_MARK: Final = 0xDD6CD31205DFF127
GRAPH_FILE_HEADER_BYTES: Final = 4096
_VERSION = 2
_HETEROGRAPHS = 2
COO: Final = 1
CSR: Final = 2
CSC: Final = 4
"""Bits of the sparse formats of a relation, which are stored in this order."""


class StoredEdges(NamedTuple):
    """The edges of one type on disk.

    `COO`: `rows` and `columns` are sources and destinations, (E,) each. `CSR`: `rows` are offsets into
    `columns`, (num_rows + 1,). `CSC`: as `CSR`, with destinations as rows.
    """

    kind: int
    num_rows: int
    num_columns: int
    rows: StoredArray
    columns: StoredArray
    edge_ids: StoredArray  # (E,) of each entry; empty if entries are in the order of IDs

    @property
    def num_edges(self) -> int:
        return self.columns.shape[0]

    def ends(self) -> tuple[Array, Array]:
        """Read sources and destinations in the order of edge IDs, (E,) each; `PartitionError` if they do not fit."""
        columns = self._read(self.columns, self.num_edges, self.num_columns)
        if self.kind == COO:
            rows = self._read(self.rows, self.num_edges, self.num_rows)
        else:
            offsets = self._read(self.rows, self.num_rows + 1, self.num_edges + 1)
            degrees = np.diff(offsets)
            if offsets[0] != 0 or offsets[-1] != self.num_edges or (degrees < 0).any():
                raise self._damaged("offsets that do not ascend from 0 to the number of edges")
            rows = np.arange(self.num_rows, dtype=offsets.dtype).repeat(degrees)
        if self.edge_ids.shape != (0,):
            entry_of = np.full(self.num_edges, -1)
            entry_of[self._read(self.edge_ids, self.num_edges, self.num_edges)] = np.arange(self.num_edges)
            if (entry_of < 0).any():
                raise self._damaged("edge IDs that are not each there once")
            rows, columns = rows[entry_of], columns[entry_of]
        return (columns, rows) if self.kind == CSC else (rows, columns)

    def _read(self, stored: StoredArray, count: int, limit: int) -> Array:
        """Whole numbers, (count,) int32 if that holds `limit`, from 0 to below it."""
        if stored.shape != (count,) or stored.dtype not in (np.int32, np.int64):
            raise self._damaged(f"{stored.dtype_name} of shape {stored.shape} for {count} indices")
        numbers = np.empty(count, np.int32 if limit < 2**31 else np.int64)
        for start, rows in stored.slices():
            least, greatest = rows.min(), rows.max()
            if not 0 <= least <= greatest < limit:
                raise self._damaged(f"indices from {least} to {greatest} below {limit}")
            numbers[start : start + len(rows)] = rows
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
    """A graph on disk: the nodes of each type with their fields, and its edges."""

    path: Path
    num_nodes: dict[str, int]
    fields: dict[str, dict[str, StoredArray]]
    relations: list[Relation]


def open_graph_file(path: Path) -> StoredGraph:
    """Find the only graph of a file, without reading values. `PartitionError` if there are none or several."""
    with open_file(path) as file:
        cursor = Cursor(path, file)
        start, end = _place(cursor)
        cursor.move(0)
        cursor.mark(GRAPH_FILE_MARK, "a graph file")
        version, kind = cursor.numbers("QQ")
        if (version, kind) != (_VERSION, _HETEROGRAPHS):
            raise cursor.unknown(f"graphs of version {version} and kind {kind}")
        cursor.move(start)
        graph = _graph(cursor)
        if cursor.at != end:
            raise cursor.unknown(f"a graph that does not end where the table of graphs begins, at byte {end}")
        return graph


def _place(cursor: Cursor) -> tuple[int, int]:
    """The first and last byte of the graph, from the table at the end of the file; a truncated file lacks it."""
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
    """The edges of one type, in the first of the stored sparse formats."""
    cursor.mark(RELATION_MARK, "a relation")
    bits, are_bits, _, _ = cursor.numbers("4i")
    if not are_bits or bits not in range(1, (COO | CSR | CSC) + 1):
        raise cursor.unknown(f"edges in the sparse formats {bits}")
    found = []
    for kind in (COO, CSR, CSC):
        if kind & bits:
            _type_graph(cursor)
            found.append(_sparse(cursor, kind))
    return found[0]


def _type_graph(cursor: Cursor) -> StoredEdges:
    cursor.mark(META_GRAPH_MARK, "the graph of types")
    return _sparse(cursor, CSR)


def _sparse(cursor: Cursor, kind: int) -> StoredEdges:
    cursor.mark(COO_MARK if kind == COO else CSR_MARK, "edges")
    num_columns, num_rows = cursor.numbers("QQ")
    rows, columns, edge_ids = cursor.array(), cursor.array(), cursor.array()
    cursor.numbers("??" if kind == COO else "?")  # whether they are sorted
    return StoredEdges(kind, num_rows, num_columns, rows, columns, edge_ids)


def graph_file_layout(
    num_nodes: int, num_edges: int, node_fields: Mapping[str, type], edge_fields: Mapping[str, type]
) -> FileLayout:
    """The layout of a file with one homogeneous graph, for `dgl.load_graphs`.

    The arrays are named `src`, `dst`, `node/FIELD` and `edge/FIELD`, with one entry per node or edge.
    """
    layout = FileLayout()
    graph_at = GRAPH_FILE_HEADER_BYTES + 16
    layout.numbers("QQQQ", GRAPH_FILE_MARK, _VERSION, _HETEROGRAPHS, 1)
    layout.zeros(until=GRAPH_FILE_HEADER_BYTES)
    layout.numbers("QQ", graph_at, 0)  # no labels
    layout.numbers("Q", HETEROGRAPH_MARK)
    _add_type_graph(layout)
    layout.numbers("QQiiii", 1, RELATION_MARK, COO, 1, COO | CSR | CSC, 1)  # stored as COO; DGL may create any format
    _add_type_graph(layout)
    layout.numbers("QQQ", COO_MARK, num_nodes, num_nodes)
    for end in ("src", "dst"):
        layout.array(end, ArraySpec(np.dtype("<i8"), (num_edges,)))
    layout.integers()  # edges are in order
    layout.numbers("??", 0, 0)  # neither end is sorted
    layout.numbers("QQ", 1, num_nodes)
    for kind, count, fields in (("node", num_nodes, node_fields), ("edge", num_edges, edge_fields)):
        layout.numbers("QQ", 1, len(fields))
        for name, dtype in fields.items():
            layout.text(name)
            layout.array(f"{kind}/{name}", ArraySpec(np.dtype(dtype).newbyteorder("<"), (count,)))
    for name in ("_N", "_E"):
        layout.numbers("Q", 1)
        layout.text(name)
    layout.numbers("QQQQ", 16, 1, graph_at, 16)  # the table of graphs between its sizes
    return layout


def _add_type_graph(layout: FileLayout) -> None:
    """The metagraph of one edge type from the only node type to itself."""
    layout.numbers("QQQQ", META_GRAPH_MARK, CSR_MARK, 1, 1)
    for values in ((0, 1), (0,), (0,)):
        layout.integers(*values)
    layout.numbers("?", 0)  # not sorted
