"""The edges of a task as a stream with progress, and what one pass over them tells: the degrees."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from sar.errors import ConfigError
from sar.partition.assign.assignment import AssignmentTask
from sar.partition.assign.compiled import compiled
from sar.partition.graph_data import Array


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
    wrong = _first_outside(src, dst, num_nodes)
    if wrong >= 0:
        raise ConfigError(
            f"edge {first_edge + wrong} leads from node {src[wrong]} to node {dst[wrong]}; expected nodes 0 to "
            f"{num_nodes - 1} (nodes and edges of several types are numbered type after type)."
        )


def count_degrees(task: AssignmentTask) -> Array:
    """In-degree plus out-degree of every node, (N,), self-loops left out."""
    degree = np.zeros(task.graph.total_nodes, index_dtype(2 * task.graph.total_edges))
    for src, dst in edge_chunks(task, "counting degrees"):
        _count(src, dst, degree)
    return degree


def index_dtype(largest: int) -> np.dtype[Any]:
    """The smaller of int32 and int64 that holds numbers up to `largest`."""
    return np.dtype(np.int32 if largest < 2**31 else np.int64)


@compiled
def _first_outside(src: Array, dst: Array, num_nodes: int) -> int:
    """The first edge that ends outside the graph, or -1."""
    outside = False
    for i in range(len(src)):  # without a branch, which makes it as fast as memory
        outside |= (src[i] < 0) | (src[i] >= num_nodes) | (dst[i] < 0) | (dst[i] >= num_nodes)
    if outside:
        for i in range(len(src)):
            if not (0 <= src[i] < num_nodes and 0 <= dst[i] < num_nodes):
                return i
    return -1


@compiled
def _count(src: Array, dst: Array, degree: Array) -> None:
    for i in range(len(src)):
        if src[i] != dst[i]:
            degree[src[i]] += 1
            degree[dst[i]] += 1
