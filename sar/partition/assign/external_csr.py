"""Neighbour lists on disk, for methods that look at neighbourhoods of graphs larger than memory.

The lists are those of the symmetrised graph: every edge in both directions, self-loops dropped. Where each edge is
stored with its reverse they are those of the edges as stored, so that none is there twice. Parallel edges stay as
repeated neighbours; if lists are contracted, they become one neighbour with a weight.

[Note: two passes] One pass counts degrees, which gives the place of every list in the file, and sums a hash of each
edge less that of its reverse: 0 if each is stored with its reverse. The second writes the entries into buckets:
ranges of nodes whose lists fill a buffer. Then each bucket is brought into order in memory and appended to the lists.
So all writing and later reading is sequential. Clusters take one pass: their nodes' degrees bound the lengths.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from sar.data.arrays import Array
from sar.errors import ConfigError
from sar.partition.assign.task import AssignmentTask, compiled, draw
from sar.partition.graph_source import GraphSource, index_dtype

BUCKET = 1 << 21
"""Neighbours that are brought into order at a time: 8 MB of them."""
WINDOW = 1 << 20
"""Neighbours that are read at a time."""
PIECE = 1 << 17
"""Edges that are written to buckets at a time."""

T = TypeVar("T")

Pieces = Callable[[], Iterator[tuple[Array, Array, Array | None]]]
"""Nodes, their neighbours, and weights of entries, piece by piece: all with weights, or none."""


class Window(NamedTuple):
    """The lists of some nodes, one after the other; valid until the next window is asked for."""

    first: int  # node
    bounds: Array  # (nodes + 1,), the bounds of the lists among all entries of the graph
    neighbours: Array  # (entries,) integers
    weights: Array  # (entries,) float32; empty if all are 1

    @property
    def last(self) -> int:
        """The node after these."""
        return self.first + len(self.bounds) - 1


class Tally(NamedTuple):
    """The edges of one node, added up by the labels of its neighbours."""

    sums: Array  # (L,), for each label; 0 for labels that the node at hand does not meet
    labels: Array  # at least as many as a node may meet; the first ones are those that it meets


@dataclass(frozen=True)
class ExternalCsr:
    """Neighbour lists in files; the list of node v is entries indptr[v]:indptr[v + 1].

    Memory is O(nodes) + buffers of fixed size, but for a node whose list is longer than a buffer. While the files are
    made they take 12 bytes of disk for each entry (20 with weights), afterwards 4 (8); with 2^31 nodes or more, twice
    that.
    """

    folder: Path  # holds `neighbours`, int32, or int64 from 2^31 nodes on, and if weighted `weights`, float32
    indptr: Array  # (N + 1,) int64
    weighted: bool

    @classmethod
    def of_graph(
        cls, graph: GraphSource, folder: Path, bucket: int = BUCKET, progress: Callable[[float], None] = lambda _: None
    ) -> "ExternalCsr":
        """The lists of a graph, in a new folder; `PartitionError` if an edge ends outside the graph."""
        node = index_dtype(graph.total_nodes)
        edges_read = 0

        def edges() -> Iterator[tuple[Array, Array]]:
            nonlocal edges_read
            for src, dst in graph.chunks(PIECE):
                yield src, dst
                edges_read += len(src)
                progress(edges_read / (2 * graph.total_edges))

        def pieces() -> Iterator[tuple[Array, Array, None]]:
            for src, dst in edges():
                if each_with_reverse:
                    yield dst, src, None
                else:
                    ends = np.stack([src, dst], axis=1, dtype=node)
                    yield ends.reshape(-1), ends[:, ::-1].reshape(-1), None

        indptr, excess = np.zeros(graph.total_nodes + 1, np.int64), np.zeros(1, np.uint64)
        for src, dst in made_ahead(edges()):
            _count_ends(src, dst, indptr, excess)
        each_with_reverse = not excess[0]
        indptr //= 1 + each_with_reverse
        return _build(folder, indptr, pieces, bucket, weighted=False)

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1

    @property
    def node_dtype(self) -> Any:
        return index_dtype(self.num_nodes)

    @property
    def num_entries(self) -> int:
        """The length of all lists together."""
        return int(self.indptr[-1])

    @property
    def max_degree(self) -> int:
        """The length of the longest list."""
        return int(np.diff(self.indptr).max(initial=0))

    def windows(self, entries: int = WINDOW) -> Iterator[Window]:
        """All lists, in the order of nodes, at most `entries` of them at a time unless one list is longer."""
        bounds = _bounds(self.indptr, entries)
        size = _largest(self.indptr, bounds)
        neighbours = np.empty(size, self.node_dtype)
        weights = np.empty(size if self.weighted else 0, np.float32)
        with open(self.folder / "neighbours", "rb") as listed, open(self.folder / "weights", "rb") as weighed:
            for first, last in pairwise(bounds):
                count = int(self.indptr[last] - self.indptr[first])
                window = Window(first, self.indptr[first : last + 1], neighbours[:count], weights[:count])
                for file, buffer in ((listed, window.neighbours), (weighed, window.weights)):
                    if file.readinto(buffer.data) != buffer.nbytes:
                        raise ConfigError(f"'{file.name}' has become shorter while it was read.")
                yield window

    def contracted(self, cluster: Array, num_clusters: int, folder: Path, bucket: int = BUCKET) -> "ExternalCsr":
        """The weighted lists of the graph whose nodes are this graph's clusters, (N,), in a new folder."""

        def pieces() -> Iterator[tuple[Array, Array, Array]]:
            for window in self.windows(2 * PIECE):
                own, others = np.empty((2, len(window.neighbours)), index_dtype(num_clusters))
                weights = np.empty(len(own), np.float32)
                count = _between_clusters(window, cluster, own, others, weights)
                yield own[:count], others[:count], weights[:count]

        most = np.bincount(cluster + 1, weights=np.diff(self.indptr), minlength=num_clusters + 1).astype(np.int64)
        return _build(folder, most, pieces, bucket, weighted=True)


def lists_on_disk(task: AssignmentTask) -> ExternalCsr:
    """A task's graph as neighbour lists in its scratch directory."""
    return ExternalCsr.of_graph(task.graph, task.scratch / "lists", progress=partial(task.progress, "neighbour lists"))


@compiled
def list_of(window: Window, v: int) -> tuple[int, int]:
    """The bounds of a node's list in a window."""
    place = v - window.first
    return window.bounds[place] - window.bounds[0], window.bounds[place + 1] - window.bounds[0]


@compiled
def add_up(window: Window, v: int, label: Array, ours: Array, first: int, last: int, tally: Tally) -> int:
    """Sum the weights of a node's edges by the neighbours' labels, (N,), but for label -1; how many labels there are.

    Nodes `first` to `last` - 1 have their labels in `ours`, (N,). The tally's sums are to be set back to 0 afterwards.
    """
    sums, labels = tally
    count = 0
    begin, end = list_of(window, v)
    for e in range(begin, end):
        other = window.neighbours[e]
        one = ours[other] if first <= other < last else label[other]
        if one >= 0:
            total = sums[one]
            labels[count] = one  # there is room for one more
            count += total == 0
            sums[one] = total + (window.weights[e] if window.weights.size else np.float32(1))
    return count


def _bounds(indptr: Array, entries: int) -> list[int]:
    """Cuts between nodes, so that each range has at most `entries` entries, or is one node."""
    bounds, last = [0], len(indptr) - 1
    while bounds[-1] < last:
        end = int(np.searchsorted(indptr, indptr[bounds[-1]] + entries, side="right")) - 1
        bounds.append(max(end, bounds[-1] + 1))
    return bounds


def _largest(indptr: Array, bounds: list[int]) -> int:
    return int(np.diff(indptr[bounds]).max(initial=0))


def _build(folder: Path, indptr: Array, pieces: Pieces, bucket: int, weighted: bool) -> ExternalCsr:
    """The second of [Note: two passes]. `indptr[v + 1]` is the length of list v; with weights, the most it can be."""
    np.cumsum(indptr, out=indptr)
    folder.mkdir()
    bounds, unsorted = _bounds(indptr, bucket), folder / "unsorted"
    with open(unsorted, "w+b") as file:
        ends = _write_buckets(file, indptr, bounds, pieces, weighted)
        indptr = _sort_buckets(file, folder, indptr, bounds, ends, weighted)
    unsorted.unlink()
    return ExternalCsr(folder, indptr, weighted)


def _record(num_nodes: int, weighted: bool) -> np.dtype[Any]:
    node = index_dtype(num_nodes)
    return np.dtype([("own", node), ("other", node), *([("weight", np.float32)] if weighted else [])])


def made_ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items; another thread makes the next one while one is in use."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item


def _write_buckets(file: Any, indptr: Array, bounds: list[int], pieces: Pieces, weighted: bool) -> Array:
    """Write all entries as records, each bucket from the first place of its lists; returns the end of each bucket."""
    record = _record(len(indptr) - 1, weighted)
    bucket_of = np.repeat(np.arange(len(bounds) - 1, dtype=np.int32), np.diff(bounds))
    place = indptr[bounds]  # the place of the next record of each bucket
    for own, others, weights in made_ahead(pieces()):
        records = np.empty(len(own), record)
        ends = np.zeros(len(bounds), np.int64)
        _sort_by_bucket(own, others, weights, bucket_of, ends, records)
        for bucket in np.flatnonzero(np.diff(ends)).tolist():
            of_bucket = records[ends[bucket] : ends[bucket + 1]]
            file.seek(int(place[bucket]) * record.itemsize)
            file.write(of_bucket.data)
            place[bucket] += len(of_bucket)
    return place


def _sort_buckets(file: Any, folder: Path, indptr: Array, bounds: list[int], ends: Array, weighted: bool) -> Array:
    """Write the lists, bucket after bucket; returns their bounds, which move if some got shorter."""
    num_nodes = len(indptr) - 1
    record = _record(num_nodes, weighted)
    size = _largest(indptr, bounds)
    neighbours = np.empty(size, index_dtype(num_nodes))
    weights = np.empty(size, np.float32) if weighted else None
    merged = np.zeros(num_nodes + 1, np.int64) if weighted else indptr
    last_seen = np.full(num_nodes * weighted, -1, np.int64)
    with open(folder / "neighbours", "wb") as listed, open(folder / "weights", "wb") as weighed:
        for (first, last), end in zip(pairwise(bounds), ends.tolist(), strict=False):
            begin = indptr[first:last] - indptr[first]
            count, place = end - int(indptr[first]), begin.copy()
            file.seek(int(indptr[first]) * record.itemsize)
            for start in range(0, count, 2 * PIECE):
                records = np.empty(min(2 * PIECE, count - start), record)
                file.readinto(records.data)
                _place(records, first, place, neighbours, weights)
            if weights is not None:  # `place` is now the end of the lists
                _merge(first, begin, place, neighbours, weights, last_seen, merged)
                count = int(merged[last] - merged[first])
                weighed.write(weights[:count].data)
            listed.write(neighbours[:count].data)
    return merged


@compiled
def _between_clusters(window: Window, cluster: Array, own: Array, others: Array, weights: Array) -> int:
    """Write the entries of a window that lead from one cluster to another; how many there are."""
    count = 0
    for v in range(window.first, window.first + window.bounds.size - 1):
        begin, end = list_of(window, v)
        for e in range(begin, end):
            own[count], others[count] = cluster[v], cluster[window.neighbours[e]]
            weights[count] = window.weights[e] if window.weights.size else np.float32(1)
            count += own[count] != others[count]
    return count


@compiled
def _count_ends(src: Array, dst: Array, indptr: Array, excess: Array) -> None:
    """Add to indptr[v + 1] the ends of edges at node v, and to `excess` hashes of the edges less those of reverses."""
    for i in range(src.size):
        if src[i] != dst[i]:
            indptr[src[i] + 1] += 1
            indptr[dst[i] + 1] += 1
            excess[0] += draw(np.uint64(0), src[i], dst[i]) - draw(np.uint64(0), dst[i], src[i])


@compiled
def _sort_by_bucket(
    own: Array, others: Array, weights: Array | None, bucket_of: Array, ends: Array, records: Array
) -> None:
    """Write entries to records, ordered by bucket; those of bucket b end at ends[b + 1]."""
    for i in range(own.size):
        if own[i] != others[i]:
            ends[bucket_of[own[i]] + 1] += 1
    for b in range(1, ends.size):
        ends[b] += ends[b - 1]
    # ends[b] is the place of the next record of bucket b and, once all are placed, the end of the bucket.
    for i in range(own.size):
        if own[i] != others[i]:
            bucket = bucket_of[own[i]]
            place = ends[bucket]
            records[place].own, records[place].other = own[i], others[i]
            if weights is not None:
                records[place].weight = weights[i]
            ends[bucket] += 1
    for b in range(ends.size - 1, 0, -1):
        ends[b] = ends[b - 1]
    ends[0] = 0


@compiled
def _place(records: Array, first: int, place: Array, neighbours: Array, weights: Array | None) -> None:
    """Put each record at the next place of its node's list."""
    for i in range(records.size):
        list_number = records[i].own - first
        at = place[list_number]
        neighbours[at] = records[i].other
        if weights is not None:
            weights[at] = records[i].weight
        place[list_number] += 1


@compiled
def _merge(
    first: int, begins: Array, ends: Array, neighbours: Array, weights: Array, last_seen: Array, merged: Array
) -> None:
    """Sum the weights of equal neighbours of a node, in place; lists are moved together.

    last_seen: (N,) place among all merged lists where a neighbour was put last.
    merged: (N + 1,) indptr of the merged lists, known up to node `first`.
    """
    base = merged[first]
    for v in range(ends.size):
        start = merged[first + v]
        end = start
        for read in range(begins[v], ends[v]):
            other, weight = neighbours[read], weights[read]
            if last_seen[other] >= start:
                weights[last_seen[other] - base] += weight
            else:
                last_seen[other] = end
                neighbours[end - base], weights[end - base] = other, weight
                end += 1
        merged[first + v + 1] = end
