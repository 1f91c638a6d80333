"""Clean-up of a graph before partitioning: reverse edges, duplicates, self-loops.

[Note: sorting on disk] Duplicates are found by sorting. A range of sources with too many edges for memory is divided
into narrower ranges: its edges go to one file per range, and the files are processed in order. A single source with too
many edges is divided by destinations in the same way, until only copies of one edge remain. An edge and its features
are one record, so every file is read and written sequentially. A reverse edge stores `~dst` instead of `dst`, to
distinguish copies in the input from edges that coincide with a reverse edge.
"""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from sar.common_tuples import CanonicalEtype, StrPath
from sar.data.arrays import Array, ArrayFile, StoredArray
from sar.errors import ConfigError
from sar.partition.graph_source import ArrayEdges, Column, EdgeSource, GraphSource, index_dtype
from sar.partition.ingest.objects import from_object
from sar.tensors.id_arrays import first_of_equals, pieces

_MEMORY = 256 << 20
_MOST_FILES = 64  # open at a time
_COPIES = 5  # maximum copies of a record in memory: as read, sorted, and for sorting
_SRC, _DST = "src", "dst"  # fields of a record; features are numbered


def clean_up(
    graph: GraphSource | Any,
    scratch: StrPath,
    *,
    undirected: bool = False,
    remove_duplicates: bool = False,
    self_loops: Literal["keep", "remove", "add"] = "keep",
    memory: int | None = None,
) -> GraphSource:
    """Add reverse edges, and remove duplicate edges or self-loops, out of core.

    With `undirected` or `remove_duplicates`, edges are sorted by source and then destination; otherwise their order
    does not change. Edge features move with their edges. The `notes` of the result say how many duplicates were
    removed.

    Args:
        graph: the graph, also in memory as for `partition_graph`.
        scratch: directory for the new edges; created if missing. It must exist as long as the result is used.
        undirected: add the reverse of every edge, and remove duplicates. Keeps the features of the first duplicate; a
            new reverse edge copies the features of its edge. Between node types, reverse edges become a separate
            relation, `RELATION reversed`, and duplicates are kept. Default False.
        remove_duplicates: of edges with equal ends, keep only the first. Default False.
        self_loops: `keep` (default); `remove` all; or `add` exactly one to every node, which replaces existing
            self-loops and comes last. Applies to relations between nodes of one type.
        memory: approximate bytes to use. Default None: 256 MiB.

    Raises:
        ConfigError: self-loops to be added would lack the features of other edges, or a relation already has the name
            of a reversed one.
        PartitionError: an edge ends at no node, or the disk is full. Without any changes, edges are not read;
            `write_partitions` then checks their ends.
    """
    graph = from_object(graph)
    Path(scratch).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="edges-", dir=scratch))
    edges: dict[CanonicalEtype, EdgeSource] = {}
    edge_data: dict[CanonicalEtype, Mapping[str, Column]] = {}
    notes = [*graph.notes]
    for number, (etype, source) in enumerate(graph.edges.items()):
        between = etype[0] != etype[2]
        relation = _Relation(
            source,
            graph.edge_data.get(etype, {}),
            (graph.num_nodes[etype[0]], graph.num_nodes[etype[2]]),
            both_ways=undirected and not between,
            unique=remove_duplicates or (undirected and not between),
            self_loops="keep" if between else self_loops,
        )
        if relation.self_loops == "add" and relation.columns:
            raise ConfigError(
                f"edges of {etype} have the features {', '.join(relation.columns)}, and added self-loops would have "
                "none. Leave the features out, or add the self-loops with their features to the input."
            )
        edges[etype], edge_data[etype] = relation.clean(folder, str(number), _MEMORY if memory is None else memory)
        if relation.removed:
            lost = f", with their {', '.join(relation.columns)}" if relation.columns else ""
            notes.append(
                f"{relation.removed} of {source.num_edges} edges {':'.join(etype)} were removed{lost}: an earlier one "
                "has the same ends."
            )
    for etype in [one for one in edges if one[0] != one[2]] if undirected else ():
        reverse = etype[2], f"{etype[1]} reversed", etype[0]
        if reverse in edges:
            raise ConfigError(f"there is a relation {reverse} already; rename it, or leave the graph directed.")
        edges[reverse], edge_data[reverse] = _ReversedEdges(edges[etype]), edge_data[etype]
    return replace(graph, edges=edges, edge_data=edge_data, notes=notes)


@dataclass(frozen=True)
class _ReversedEdges(EdgeSource):
    """Edges with sources and destinations exchanged."""

    edges: EdgeSource

    @property
    def num_edges(self) -> int:
        return self.edges.num_edges

    def read(self, start: int, stop: int) -> tuple[Array, Array]:
        src, dst = self.edges.read(start, stop)
        return dst, src


class _Range(NamedTuple):
    """Edges from the sources to the destinations of two ranges [start, end)."""

    src: tuple[int, int]
    dst: tuple[int, int]

    def divided(self, parts: int) -> tuple[str, list["_Range"]]:
        """Divide by one of the ends; return this end and at most `parts` ranges, in the order of their edges."""
        by = _SRC if self.src[1] - self.src[0] > 1 else _DST
        start, end = getattr(self, by)
        width = -(-(end - start) // parts)
        starts = range(start, end, width)
        return by, [self._replace(**{by: (first, min(first + width, end))}) for first in starts]


@dataclass
class _Relation:
    """The edges of one type, and how to clean them up."""

    edges: EdgeSource
    columns: Mapping[str, Column]
    num_nodes: tuple[int, int]
    both_ways: bool
    unique: bool
    self_loops: Literal["keep", "remove", "add"]
    removed: int = 0  # number of duplicates removed from the input

    def clean(self, folder: Path, name: str, memory: int) -> tuple[EdgeSource, Mapping[str, Column]]:
        """The new edges and their features, in files."""
        if not self.unique and self.self_loops == "keep":
            return self.edges, self.columns
        most = max(1, memory // (_COPIES * self.record.itemsize))
        kinds: list[tuple[np.dtype[Any], tuple[int, ...]]] = [(index_dtype(n - 1), ()) for n in self.num_nodes]
        kinds += [(column.dtype, column.shape[1:]) for column in self.columns.values()]
        with ExitStack() as stack:
            files = {
                field: stack.enter_context(ArrayFile(folder / f"{name}.{field}", dtype, row_shape))
                for field, (dtype, row_shape) in zip(self.record.names or (), kinds, strict=True)
            }
            for records in self._cleaned(folder, most):
                for field, file in files.items():
                    file.append(records[field])
            src, dst, *features = (file.array() for file in files.values())
        return ArrayEdges(src, dst), dict(zip(self.columns, features, strict=True))

    @property
    def record(self) -> np.dtype[Any]:
        """An edge with its features."""
        ends = [(_SRC, np.int64), (_DST, np.int64)]
        columns = enumerate(self.columns.values())
        return np.dtype(ends + [(f"feature{number}", column.dtype, column.shape[1:]) for number, column in columns])

    def _cleaned(self, folder: Path, most: int) -> Iterator[Array]:
        """Records of the new edges in chunks of at most `most`."""
        if self.unique:
            count = self.edges.num_edges * (2 if self.both_ways else 1)
            whole = _Range((0, self.num_nodes[0]), (0, self.num_nodes[1]))
            yield from self._sorted(self._stream(most), count, whole, folder, most)
        else:
            yield from self._stream(most)
        if self.self_loops == "add":
            for nodes in pieces(self.num_nodes[0], most):
                loops = np.empty(nodes.stop - nodes.start, self.record)
                loops[_SRC] = loops[_DST] = np.arange(nodes.start, nodes.stop)
                yield loops

    def _stream(self, rows: int) -> Iterator[Array]:
        """Records in chunks: the edges, then with `both_ways` their reverses."""
        for forward in (True, False) if self.both_ways else (True,):
            row = 0
            for ends in self.edges.chunks(rows):
                records = np.empty(len(ends[0]), self.record)
                records[_SRC], records[_DST] = ends if forward else (ends[1], ~ends[0])
                for number, column in enumerate(self.columns.values()):
                    records[f"feature{number}"] = column[row : row + len(records)]
                row += len(records)
                yield records if self.self_loops == "keep" else records[ends[0] != ends[1]]

    def _sorted(self, stream: Iterable[Array], count: int, whole: _Range, folder: Path, most: int) -> Iterator[Array]:
        """The first of equal edges, sorted by source and destination; see [Note: sorting on disk].

        The stream has at most `count` records in chunks of at most `most`, the number that fits in memory.
        """
        num_destinations = whole.dst[1] - whole.dst[0]
        possible = (whole.src[1] - whole.src[0]) * num_destinations
        if not count:
            return
        if possible == 1:  # all are copies of one edge
            first: Array | None = None
            copies = 0
            for records in stream:
                first = records[:1] if first is None and len(records) else first
                copies += self._num_in_input(records)
            if first is not None:
                self.removed += copies - self._num_in_input(first)
                first[_DST] = _destinations(first)
                yield first
        elif count <= most and possible < 2**62:
            records = np.concatenate(list(stream))
            key = (records[_SRC] - whole.src[0]) * num_destinations
            key += _destinations(records) - whole.dst[0]
            if self.both_ways:  # reverses come after the edges themselves
                key = key << 1 | (records[_DST] < 0)
            # Without features copies are identical, so the sort need not be stable.
            order = np.argsort(key, kind="stable" if self.columns else None)
            ascending = key[order] >> 1 if self.both_ways else key[order]
            first_ones = records[order[first_of_equals(ascending)]]
            self.removed += self._num_in_input(records) - self._num_in_input(first_ones)
            first_ones[_DST] = _destinations(first_ones)
            yield first_ones
        else:
            by, ranges = whole.divided(min(_MOST_FILES, max(2, -(-2 * count // most))))
            with tempfile.TemporaryDirectory(prefix="sort-", dir=folder) as files:
                for part, one in zip(_distributed(stream, by, ranges, Path(files)), ranges, strict=True):
                    count = part.shape[0]
                    yield from self._sorted(map(part.__getitem__, pieces(count, most)), count, one, folder, most)
                    part.path.unlink()

    def _num_in_input(self, records: Array) -> int:
        """The number of records that are edges of the input rather than reverses."""
        return int(np.count_nonzero(records[_DST] >= 0)) if self.both_ways else len(records)


def _destinations(records: Array) -> Array:
    """The destinations of edges and reverse edges, (n,); see [Note: sorting on disk]."""
    return records[_DST] ^ (records[_DST] >> 63)


def _distributed(stream: Iterable[Array], by: str, ranges: list[_Range], folder: Path) -> list[StoredArray]:
    """The records of each range, in the order of the stream."""
    start, end = getattr(ranges[0], by)
    with ExitStack() as stack:
        files: list[ArrayFile] = []
        for records in stream:
            if not files:
                made = (ArrayFile(folder / str(number), records.dtype) for number in range(len(ranges)))
                files = [stack.enter_context(file) for file in made]
            values = _destinations(records) if by == _DST else records[_SRC]
            which = ((values - start) // (end - start)).astype(np.uint8)
            order = np.argsort(which, kind="stable")
            bounds = np.searchsorted(which[order], np.arange(len(ranges) + 1))
            for file, low, high in zip(files, bounds[:-1], bounds[1:], strict=True):
                if low < high:
                    file.append(records[order[low:high]])
        return [file.array() for file in files]
