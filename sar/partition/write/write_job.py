"""Shared state of the steps that write a partition directory, and their memory.

[Note: memory]
Per node: its part, its new ID, and an entry of the table in `part_graph`; if nodes have an order, also their places in
it and the node of each new ID. Apart from these, only slices of `slice_bytes`; whole fields and parts are never in
memory.
"""

import resource
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sar.common_tuples import EID, ORIG_ID
from sar.data.arrays import Array
from sar.data.tensor_files import ArraySpec, stored_dtype
from sar.errors import ConfigError
from sar.partition.graph_source import CHUNK_ROWS, Column, GraphSource, Progress, check_parts, index_dtype
from sar.partition.new_directory import NewDirectory
from sar.tensors.id_arrays import pieces

_SLICE_BYTES = 32 << 20
_LEAST_SLICE_BYTES = 1 << 20
_ROWS = 1 << 14  # nodes at a time; few, because numpy makes several copies with 8 bytes each
_SPARE_FILES = 64
_KEPT = 2
"""Process memory per byte in use, because the allocator keeps about the same amount for the next slice."""


@dataclass(frozen=True)
class NodeNumbering:
    """The part and the new ID of every node, with nodes numbered type after type, as in the `GraphSource`.

    New IDs go partition after partition, inside these by type, and inside these by an order of the nodes, or by
    original ID.
    """

    part_of: Array  # (N,), of the smallest integer type that holds P - 1
    new_id: Array  # (N,), int32 if that is enough
    ranges: Array  # [start, end) of new IDs by part and type, (P, T, 2); types in their order in the graph
    old_id: Array | None  # (N,), the node of every new ID; None if they ascend within each part and type

    @classmethod
    def of(cls, graph: GraphSource, part_of: Array, num_parts: int, place: Array | None = None) -> "NodeNumbering":
        """Number the nodes of a graph; `ConfigError` if the assignment, (N,), does not fit it or the parts.

        place: (N,) integers by which to order the nodes within each part and type; None: by original ID.
        """
        check_parts(part_of, graph.total_nodes, num_parts, "the assignment")
        part_of = part_of.astype(np.min_scalar_type(num_parts - 1), copy=False)
        ntypes, by_type = list(graph.num_nodes), list(graph.by_type(part_of).values())
        counts = np.zeros((num_parts, len(by_type)), np.int64)
        for i, parts in enumerate(by_type):
            for chunk in pieces(len(parts), _ROWS):
                counts[:, i] += np.bincount(parts[chunk], minlength=num_parts)
        ends = counts.cumsum().reshape(counts.shape)
        new_id = np.empty(len(part_of), index_dtype(len(part_of)))
        for i, (parts, new) in enumerate(zip(by_type, graph.by_type(new_id).values(), strict=True)):
            reached = (ends - counts)[:, i]
            visits = None if place is None else place[graph.nodes_of(ntypes[i])].argsort(kind="stable")
            for chunk in pieces(len(parts), _ROWS):
                nodes = np.arange(chunk.start, chunk.stop) if visits is None else visits[chunk]
                order, sizes = by_part(parts[nodes], num_parts)
                firsts = sizes.cumsum() - sizes
                new[nodes[order]] = np.repeat(reached - firsts, sizes) + np.arange(len(order))
                reached = reached + sizes
        old_id = None
        if place is not None:
            old_id = np.empty_like(new_id)
            old_id[new_id] = np.arange(len(new_id), dtype=new_id.dtype)
        return cls(part_of, new_id, np.stack([ends - counts, ends], axis=2), old_id)

    def bounds(self, part: int) -> tuple[int, int]:
        """The new IDs [start, end) of a part."""
        return int(self.ranges[part, 0, 0]), int(self.ranges[part, -1, 1])


@dataclass(frozen=True)
class OutputOptions:
    """The options of writing, as in `sar.write_partitions`; `ConfigError` for halos that cannot be."""

    directory: Path
    name: str = ""  # the graph's own, else `graph`
    memory: int | None = None  # bytes that each step may add to the process
    num_hops: int | None = None

    def __post_init__(self) -> None:
        if self.num_hops is not None and not 1 <= self.num_hops < 2**31:
            raise ConfigError(
                f"num_hops is {self.num_hops}; expected 1 to 2**31 - 1, or none: 0 would drop the edges between parts."
            )


@dataclass(frozen=True)
class WriteJob:
    """A graph to write, and its directory."""

    directory: NewDirectory
    graph: GraphSource
    numbering: NodeNumbering
    slice_bytes: int  # limit for a slice of the graph, with all copies
    progress: Progress
    num_hops: int | None  # as in `OutputOptions`

    @property
    def num_parts(self) -> int:
        return len(self.numbering.ranges)

    @cached_property
    def ntypes(self) -> list[str]:
        """Node types by type ID: in their order in the graph, which DGL sorts and PyTorch Geometric does not."""
        return list(self.graph.num_nodes)

    @cached_property
    def etypes(self) -> list[tuple[str, str, str]]:
        """Edge types by type ID: in their order in the graph, which layers may depend on."""
        return list(self.graph.edges)

    @cached_property
    def id_type(self) -> np.dtype[Any]:
        """The dtype that holds every node and edge ID."""
        return index_dtype(max(self.graph.total_nodes, *(edges.num_edges for edges in self.graph.edges.values()), 0))

    def rows_in_slice(self, row_bytes: int) -> int:
        """The number of rows that fit, from the bytes per row with all copies."""
        return max(1, min(CHUNK_ROWS, self.slice_bytes // row_bytes))


def stored_spec(name: str, column: Column) -> ArraySpec:
    """The storage format of a field; `ConfigError` if DGL's files do not support its dtype."""
    try:
        return ArraySpec(stored_dtype(column.dtype), column.shape)
    except ConfigError as error:
        raise ConfigError(f"field '{name}' cannot be written: {error}") from error


def check_writable(graph: GraphSource, output: OutputOptions) -> None:
    """Raise `ConfigError` early if the graph does not fit DGL's format or the memory."""
    slice_bytes(graph.total_nodes, 1, output.memory)
    parts = [output.name, *graph.num_nodes, *(part for etype in graph.edges for part in etype)]
    unusable = sorted({part for part in parts if not part or "/" in part or ":" in part})
    if unusable:
        raise ConfigError(f"the names {unusable} are empty or have a slash or a colon in them; choose others.")
    if not graph.num_nodes or not graph.edges:
        raise ConfigError("the graph has no node types or no edge types; expected at least one of each.")
    rows = {**graph.num_nodes, **{":".join(etype): edges.num_edges for etype, edges in graph.edges.items()}}
    data = {**graph.node_data, **{":".join(etype): fields for etype, fields in graph.edge_data.items()}}
    for kind, fields in data.items():
        for key, column in fields.items():
            if key in (EID, ORIG_ID):
                raise ConfigError(f"field '{kind}/{key}' has the name under which parts have IDs; choose another one.")
            if kind not in rows:
                raise ConfigError(f"there is a field '{kind}/{key}', but no type '{kind}'; expected one of {[*rows]}.")
            stored_spec(f"{kind}/{key}", column)
            if tuple(column.shape[:1]) != (rows[kind],):
                found = tuple(column.shape)
                raise ConfigError(f"field '{kind}/{key}' has shape {found}; expected {rows[kind]} rows, one for each.")


def allow_open_files(count: int) -> None:
    """Increase this process's limit of open files if it is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(f"{count} parts need {needed} open files, but the limit is {hard}; raise it (ulimit -Hn).")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def slice_bytes(num_nodes: int, num_parts: int, memory: int | None, tables: int = 2) -> int:
    """The part of `memory` bytes that is available for slices, besides tables of all nodes: see [Note: memory]."""
    per_node = np.min_scalar_type(num_parts - 1).itemsize + tables * index_dtype(num_nodes).itemsize
    if memory is None:
        return _SLICE_BYTES
    left = (memory - per_node * num_nodes) // _KEPT
    if left < _LEAST_SLICE_BYTES:
        least = _KEPT * _LEAST_SLICE_BYTES
        raise ConfigError(
            f"{memory:,} bytes of memory are too little: {num_nodes:,} nodes take {per_node} bytes each, and slices of "
            f"the graph at least {least:,}. Allow at least {per_node * num_nodes + least:,}, or leave the limit out."
        )
    return min(left, _SLICE_BYTES)


def by_part(parts: Array, num_parts: int) -> tuple[Array, Array]:
    """Return a stable order of rows by part, (n,), and the number of rows of each part, (P,)."""
    return parts.argsort(kind="stable"), np.bincount(parts, minlength=num_parts)
