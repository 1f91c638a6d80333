"""A graph that may be larger than memory: edges and columns that are read in slices.

File readers create a `GraphSource`; methods and the writer read it. No function here loads a whole graph.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from sar.common_tuples import CanonicalEtype
from sar.data.arrays import Array
from sar.errors import ConfigError, PartitionError
from sar.logging_setup import logger

CHUNK_ROWS = 1 << 20
"""Edges in a chunk: 16 MB of IDs."""

ONLY_TYPE: CanonicalEtype = ("_N", "_E", "_N")
"""The types of a homogeneous graph, as DGL names them."""

LOG_SECONDS = 10.0
"""Seconds between two log lines about a stage."""
Progress = Callable[[str, float], None]
"""Called periodically with the current stage and its completed fraction, 0 to 1."""


def logged_stages() -> Progress:
    """Log the beginning of each stage, and its progress every `LOG_SECONDS`."""
    stage, told_at = "", 0.0

    def log(doing: str, share: float) -> None:
        nonlocal stage, told_at
        now = time.monotonic()
        if doing != stage:
            logger.info("%s", doing)
        elif now >= told_at + LOG_SECONDS:
            logger.info("%s: %.0f %%", doing, 100 * share)
        else:
            return
        stage, told_at = doing, now

    return log


def index_dtype(largest: int) -> np.dtype[Any]:
    """The smaller of int32 and int64 that holds numbers up to `largest`."""
    return np.dtype(np.int32 if largest < 2**31 else np.int64)


def first_outside(ids: Array, num_nodes: int) -> int | None:
    """The index of the first ID, of (n,) int64, that is not a node; None if all are from 0 to N - 1."""
    unsigned = ids.view(np.uint64)  # negative numbers become large
    return int(np.argmax(unsigned >= num_nodes)) if ids.size and int(unsigned.max()) >= num_nodes else None


def find_outside(src: Array, dst: Array, num_nodes: tuple[int, int]) -> tuple[int, str] | None:
    """The index of the first edge, of (n,) int64 each, with an end that is not a node, and the problem; or None.

    `num_nodes` counts nodes of the source and the destination type.
    """
    found: list[tuple[int, str]] = []
    for end, ids, count in zip(("source", "destination"), (src, dst), num_nodes, strict=True):
        if (row := first_outside(ids, count)) is not None:
            expected = f"0 to {count - 1}" if count < np.iinfo(np.int64).max else "0 or more"
            problem = f"the {end} is node {ids[row]}; expected {expected}. Correct the edges, or the number of nodes."
            found.append((row, problem))
    return min(found, key=lambda one: one[0], default=None)


def check_parts(part_of: Array, num_nodes: int, num_parts: int, whose: str) -> None:
    """Raise `ConfigError`, which names the assignment, unless it has one part from 0 to P - 1 per node."""
    if part_of.shape != (num_nodes,) or part_of.dtype.kind not in "iu":
        found = f"shape {part_of.shape} and type {part_of.dtype}"
        raise ConfigError(f"{whose} has {found}; expected ({num_nodes},) integers, a part for each node.")
    if num_nodes and not 0 <= part_of.min() <= part_of.max() < num_parts:
        node = int(np.argmax((part_of < 0) | (part_of >= num_parts)))
        raise ConfigError(f"{whose} puts node {node} into part {part_of[node]}; expected 0 to {num_parts - 1}.")


class EdgeSource(Protocol):
    """The E_r edges of one type in their original order, to be read repeatedly in slices."""

    @property
    def num_edges(self) -> int: ...

    def read(self, start: int, stop: int) -> tuple[Array, Array]:
        """Sources and destinations of edges `start` to `stop` - 1: IDs within their types, contiguous int64.

        Callers must not change them in place. They are int64 for any file: converting a slice costs less than reading
        it, and sums and products of 32-bit IDs could overflow silently.
        """
        ...

    def chunks(self, rows: int = CHUNK_ROWS) -> Iterator[tuple[Array, Array]]:
        """All edges, at most `rows` at a time, as from `read`."""
        for start in range(0, self.num_edges, rows):
            yield self.read(start, min(start + rows, self.num_edges))

    def describe(self, row: int, problem: str) -> str:
        """Describe the location of an edge and its problem, for errors."""
        return f"row {row} (from 0): {problem}"


class Column(Protocol):
    """A field with one row per node or edge, (rows, ...), such as a `numpy.ndarray` or `numpy.memmap`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __getitem__(self, rows: slice, /) -> Array:
        """The rows of a slice without a step."""
        ...


def parts_of_slice(lengths: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Split a slice of concatenated parts: yield the number of each part, and its first row and last row + 1."""
    first = 0
    for number, length in enumerate(lengths):
        low, high = max(start - first, 0), min(stop - first, length)
        if low < high:
            yield number, low, high
        first += length


@dataclass(frozen=True)
class JoinedColumn:
    """Concatenated columns of the same dtype and row shape: (sum of rows, ...)."""

    parts: Sequence[Column]

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.parts[0].dtype

    def __getitem__(self, rows: slice, /) -> Array:
        start, stop, _ = rows.indices(self.shape[0])
        lengths = [part.shape[0] for part in self.parts]
        pieces = [self.parts[number][low:high] for number, low, high in parts_of_slice(lengths, start, stop)]
        return pieces[0] if len(pieces) == 1 else np.concatenate([self.parts[0][0:0], *pieces])


@dataclass(frozen=True)
class ArrayEdges(EdgeSource):
    """Edges in two arrays, in memory or in files: src, dst, (E_r,) integers each."""

    src: Column
    dst: Column

    @property
    def num_edges(self) -> int:
        return self.src.shape[0]

    def read(self, start: int, stop: int) -> tuple[Array, Array]:
        rows = slice(start, stop)
        return np.ascontiguousarray(self.src[rows], np.int64), np.ascontiguousarray(self.dst[rows], np.int64)


@dataclass(frozen=True)
class _CheckedEdges(EdgeSource):
    """Edges whose ends are checked when they are read, because compiled loops rely on valid IDs."""

    edges: EdgeSource
    num_nodes: tuple[int, int]  # of the source and the destination type
    name: str

    @property
    def num_edges(self) -> int:
        return self.edges.num_edges

    def read(self, start: int, stop: int) -> tuple[Array, Array]:
        src, dst = self.edges.read(start, stop)
        if (found := find_outside(src, dst, self.num_nodes)) is not None:
            raise PartitionError(f"edges of {self.name}, {self.edges.describe(start + found[0], found[1])}")
        return src, dst


@dataclass(frozen=True)
class GraphSource:
    """A directed graph with one or several types, and fields. Types are numbered in the order of the mappings."""

    num_nodes: Mapping[str, int]  # N_t by node type
    edges: Mapping[CanonicalEtype, EdgeSource]  # by (source type, relation, destination type); ends are checked when
    # they are read, because readers rely on them
    node_data: Mapping[str, Mapping[str, Column]]  # by node type, then name: columns of N_t rows
    edge_data: Mapping[CanonicalEtype, Mapping[str, Column]]  # by edge type, then name: E_r rows in the order of edges
    name: str = ""  # name of the graph in its files, if any
    notes: Sequence[str] = ()  # remarks for the user on how the graph was read

    def __post_init__(self) -> None:
        edges = {}
        for etype, source in self.edges.items():
            unchecked = source.edges if isinstance(source, _CheckedEdges) else source
            ends = self.num_nodes.get(etype[0], 0), self.num_nodes.get(etype[2], 0)
            edges[etype] = _CheckedEdges(unchecked, ends, ":".join(etype))
        object.__setattr__(self, "edges", edges)

    @classmethod
    def homogeneous(cls, src: Column, dst: Column, num_nodes: int, node_data: Mapping[str, Column]) -> "GraphSource":
        """Create a graph of one node type and one edge type from sources and destinations, (E,) integers each."""
        return cls({ONLY_TYPE[0]: num_nodes}, {ONLY_TYPE: ArrayEdges(src, dst)}, {ONLY_TYPE[0]: node_data}, {})

    @cached_property
    def first_node(self) -> dict[str, int]:
        """The number of the first node of each type, with nodes in order of types."""
        ends = np.cumsum([0, *self.num_nodes.values()]).tolist()
        return dict(zip(self.num_nodes, ends, strict=False))

    def nodes_of(self, ntype: str) -> slice:
        """The slice of the nodes of a type among all nodes."""
        first = self.first_node[ntype]
        return slice(first, first + self.num_nodes[ntype])

    def by_type(self, values: Array) -> dict[str, Array]:
        """Split values of all nodes, (N,), by node type."""
        return {ntype: values[self.nodes_of(ntype)] for ntype in self.num_nodes}

    def by_destination(self, values: Array) -> dict[CanonicalEtype, Array]:
        """The value of each edge's destination, by edge type, from `values` of all nodes, (N,)."""
        of_type = self.by_type(values)
        return {
            etype: np.concatenate([values[:0], *(of_type[etype[2]][dst] for _, dst in edges.chunks())])
            for etype, edges in self.edges.items()
        }

    @property
    def total_nodes(self) -> int:
        return sum(self.num_nodes.values())

    @property
    def total_edges(self) -> int:
        return sum(edges.num_edges for edges in self.edges.values())

    def chunks(self, rows: int = CHUNK_ROWS) -> Iterator[tuple[Array, Array]]:
        """Sources and destinations of all edges as in `EdgeSource`, type by type, with nodes in order of types."""
        for etype, edges in self.edges.items():
            first, other = self.first_node[etype[0]], self.first_node[etype[2]]
            for src, dst in edges.chunks(rows):
                yield src + first if first else src, dst + other if other else dst  # adding 0 would copy

    def ends(self) -> tuple[Array, Array]:
        """Sources and destinations of all edges in memory, (E,) int64 each, in the order of `chunks`."""
        pieces = [(np.empty(0, np.int64), np.empty(0, np.int64)), *self.chunks()]
        src, dst = (np.concatenate(ids) for ids in zip(*pieces, strict=True))
        return src, dst
