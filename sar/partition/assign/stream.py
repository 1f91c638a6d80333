"""The edges of a task as a stream with progress, and what a pass over them tells: degrees, edges between parts."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from sar.errors import ConfigError
from sar.partition.assign.task import AssignmentTask, compiled
from sar.partition.graph_data import Array
from sar.partition.graph_source import first_outside, index_dtype


class Crossing(NamedTuple):
    """What leads from parts to parts, P of them.

    edges: (P, P) int64, edges from nodes of part p to nodes of part q; q stores them.
    halo: (P, P) int64, nodes of part p with an edge into part q: the rows that p sends to q. The diagonal is 0.
    """

    edges: Array
    halo: Array


def edge_chunks(task: AssignmentTask, doing: str) -> Iterator[tuple[Array, Array]]:
    """Chunks of sources and destinations, (rows,) int64 each, with a call of `task.progress` after each chunk.

    Raises:
        ConfigError: an edge ends outside the graph; compiled loops rely on it that none does.
    """
    done = 0
    for src, dst in task.graph.chunks():
        check_ends(src, dst, task.graph.total_nodes, done)
        yield src, dst
        done += len(src)
        task.progress(doing, done / task.graph.total_edges)


def check_ends(src: Array, dst: Array, num_nodes: int, first_edge: int) -> None:
    """Refuse edges, of which the first has the number `first_edge`, that end outside the graph.

    Raises:
        ConfigError: one does.
    """
    wrong = [place for ids in (src, dst) if (place := first_outside(ids, num_nodes)) is not None]
    if wrong:
        edge = min(wrong)
        raise ConfigError(
            f"edge {first_edge + edge} leads from node {src[edge]} to node {dst[edge]}; expected nodes 0 to "
            f"{num_nodes - 1} (nodes and edges of several types are numbered type after type)."
        )


def count_degrees(task: AssignmentTask) -> Array:
    """In-degree plus out-degree of every node, (N,), self-loops left out."""
    degree = np.zeros(task.graph.total_nodes, index_dtype(2 * task.graph.total_edges))
    for src, dst in edge_chunks(task, "counting degrees"):
        _count_degrees(src, dst, degree)
    return degree


def count_crossing(chunks: Iterable[tuple[Array, Array]], part_of: Array, num_parts: int) -> Crossing:
    """Count edges and halo rows; memory is P / 8 bytes a node, rounded up.

    Args:
        chunks: sources and destinations, each a node from 0 to N - 1.
        part_of: (N,) integers from 0 to P - 1.
        num_parts: P.

    Raises:
        ConfigError: an edge ends outside the graph.
    """
    crossing = Crossing(*np.zeros((2, num_parts, num_parts), np.int64))
    seen = np.zeros((len(part_of), (num_parts + 7) // 8), np.uint8)
    done = 0
    for src, dst in chunks:
        check_ends(src, dst, len(part_of), done)
        done += len(src)
        _count_crossing(src, dst, part_of, crossing, seen)
    return crossing


@compiled
def _count_degrees(src: Array, dst: Array, degree: Array) -> None:
    for i in range(len(src)):
        if src[i] != dst[i]:
            degree[src[i]] += 1
            degree[dst[i]] += 1


@compiled
def _count_crossing(src: Array, dst: Array, part_of: Array, crossing: Crossing, seen: Array) -> None:
    """Add some edges; bit q of row v of `seen` tells whether v is in the halo of part q already."""
    for i in range(src.size):
        p, q = part_of[src[i]], part_of[dst[i]]
        crossing.edges[p, q] += 1
        bit = np.uint8(1 << (q & 7))
        if p != q and not seen[src[i], q >> 3] & bit:
            seen[src[i], q >> 3] |= bit
            crossing.halo[p, q] += 1
