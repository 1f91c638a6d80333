"""Neighbor lists on disk, for methods that read neighborhoods of graphs larger than memory.

The lists describe the symmetrised graph: every edge in both directions, without self-loops. If each edge is
stored with its reverse, the lists contain the edges as stored, to avoid duplicates. Parallel edges become
repeated neighbors; contracting lists merges them into one neighbor with a weight.

[Note: two passes] The first pass counts degrees, which determine the position of every list in the file. It also sums
the hash of each edge minus that of its reverse, which is 0 if each edge is stored with its reverse. The second pass
writes entries into buckets, ranges of nodes whose lists fill a buffer. Then each bucket is sorted in memory and
appended to the lists. So all files are written and read sequentially. Contracting clusters takes one pass, because the
degrees of their nodes bound the lengths of lists.
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
"""Entries that are sorted at a time: 8 MB."""
WINDOW = 1 << 20
"""Entries that are read at a time."""
PIECE = 1 << 17
"""Edges that are written to buckets at a time."""

T = TypeVar("T")

Pieces = Callable[[], Iterator[tuple[Array, Array, Array | None]]]
"""Nodes, their neighbors, and weights of entries, in pieces. Either all pieces have weights or none."""


class Window(NamedTuple):
    """The concatenated lists of some nodes, valid until the next window is read."""

    first: int  # node
    bounds: Array  # (nodes + 1,), the bounds of the lists among all entries of the graph
    neighbours: Array  # (entries,) integers
    weights: Array  # (entries,) float32; empty if all are 1

    @property
    def last(self) -> int:
        """The node after the last one of the window."""
        return self.first + len(self.bounds) - 1


class Tally(NamedTuple):
    """The edge weights of one node, summed by the labels of its neighbors."""

    sums: Array  # (L,), by label; 0 for labels without a neighbor
    labels: Array  # distinct labels of the neighbors come first; the rest is unused space


@dataclass(frozen=True)
class ExternalCsr:
    """Neighbor lists in files; the list of node v is entries indptr[v]:indptr[v + 1].

    Memory is O(nodes) plus buffers of fixed size, except for a node whose list is longer than a buffer. Disk space is
    4 bytes per entry (8 with weights), and 12 (20) during construction; with 2^31 nodes or more, twice that.
    """

    folder: Path  # holds `neighbours`, int32, or int64 from 2^31 nodes on, and if weighted `weights`, float32
    indptr: Array  # (N + 1,) int64
    weighted: bool

    @classmethod
    def of_graph(
        cls, graph: GraphSource, folder: Path, bucket: int = BUCKET, progress: Callable[[float], None] = lambda _: None
    ) -> "ExternalCsr":
        """Create the lists of a graph in a new folder; `PartitionError` if an edge ends outside the graph."""
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
        """The total length of all lists."""
        return int(self.indptr[-1])

    @property
    def max_degree(self) -> int:
        """The length of the longest list."""
        return int(np.diff(self.indptr).max(initial=0))

    def windows(self, entries: int = WINDOW) -> Iterator[Window]:
        """Read all lists in order of nodes, at most `entries` entries at a time unless one list is longer."""
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
        """Create the weighted lists of the graph of clusters, (N,), in a new folder."""

        def pieces() -> Iterator[tuple[Array, Array, Array]]:
            for window in self.windows(2 * PIECE):
                own, others = np.empty((2, len(window.neighbours)), index_dtype(num_clusters))
                weights = np.empty(len(own), np.float32)
                count = _between_clusters(window, cluster, own, others, weights)
                yield own[:count], others[:count], weights[:count]

        most = np.bincount(cluster + 1, weights=np.diff(self.indptr), minlength=num_clusters + 1).astype(np.int64)
        return _build(folder, most, pieces, bucket, weighted=True)


def lists_on_disk(task: AssignmentTask) -> ExternalCsr:
    """Create a task's graph as neighbor lists in its scratch directory."""
    return ExternalCsr.of_graph(task.graph, task.scratch / "lists", progress=partial(task.progress, "neighbour lists"))


@compiled
def list_of(window: Window, v: int) -> tuple[int, int]:
    """The bounds of a node's list in a window."""
    place = v - window.first
    return window.bounds[place] - window.bounds[0], window.bounds[place + 1] - window.bounds[0]


@compiled
def add_up(window: Window, v: int, label: Array, ours: Array, first: int, last: int, tally: Tally) -> int:
    """Sum the weights of a node's edges by the neighbors' labels, (N,), except label -1; return the number of labels.

    Nodes `first` to `last` - 1 have their labels in `ours`, (N,). The caller resets the tally's sums to 0 afterwards.
    """
    sums, labels = tally
    count = 0
    begin, end = list_of(window, v)
    for e in range(begin, end):
        other = window.neighbours[e]
        one = ours[other] if first <= other < last else label[other]
        if one >= 0:
            total = sums[one]
            labels[count] = one  # `labels` has space for it
            count += total == 0
            sums[one] = total + (window.weights[e] if window.weights.size else np.float32(1))
    return count


def _bounds(indptr: Array, entries: int) -> list[int]:
    """Boundaries of node ranges with at most `entries` entries, or a single node, each."""
    bounds, last = [0], len(indptr) - 1
    while bounds[-1] < last:
        end = int(np.searchsorted(indptr, indptr[bounds[-1]] + entries, side="right")) - 1
        bounds.append(max(end, bounds[-1] + 1))
    return bounds


def _largest(indptr: Array, bounds: list[int]) -> int:
    return int(np.diff(indptr[bounds]).max(initial=0))


def _build(folder: Path, indptr: Array, pieces: Pieces, bucket: int, weighted: bool) -> ExternalCsr:
    """The second pass of [Note: two passes]. `indptr[v + 1]` is the length of list v; with weights, an upper bound."""
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
    """Yield the same items; a thread computes the next item while one is in use."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item


def _write_buckets(file: Any, indptr: Array, bounds: list[int], pieces: Pieces, weighted: bool) -> Array:
    """Write all entries as records, each bucket from the position of its first list; return the end of each bucket."""
    record = _record(len(indptr) - 1, weighted)
    bucket_of = np.repeat(np.arange(len(bounds) - 1, dtype=np.int32), np.diff(bounds))
    place = indptr[bounds]  # position of the next record of each bucket
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
    """Write the lists, bucket by bucket; return their bounds, which move if merging shortens lists."""
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
    """Write the entries of a window between different clusters; return their number."""
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
    """Add the degree of node v to indptr[v + 1], and hashes of edges minus those of their reverses to `excess`."""
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
    # ends[b] is the position of the next record of bucket b, and finally the end of the bucket.
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
    """Put each record at the next position of its node's list."""
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
    """Merge equal neighbors of a node in place, summing their weights, and close the gaps between lists.

    last_seen: (N,) last position of each neighbor in the merged lists.
    merged: (N + 1,) indptr of the merged lists, filled up to node `first`.
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
