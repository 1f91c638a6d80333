"""The edges of a task as a stream with progress, and what one pass over them tells: the degrees."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from sar.errors import PartitionError
from sar.partition.assignment import AssignmentTask
from sar.partition.graph_data import Array
from sar.partition.methods.compiled import compiled


def edge_chunks(task: AssignmentTask, doing: str) -> Iterator[tuple[Array, Array]]:
    """Chunks of sources and destinations, (rows,) int64 each, with a call of `task.progress` after each chunk."""
    done = 0
    for src, dst in task.graph.chunks():
        yield src, dst
        done += len(src)
        task.progress(doing, done / max(1, task.graph.total_edges))


def count_degrees(task: AssignmentTask) -> Array:
    """In-degree plus out-degree of every node, (N,), self-loops left out.

    Raises:
        PartitionError: an edge ends outside the graph.
    """
    num_nodes = task.graph.total_nodes
    degree = np.zeros(num_nodes, index_dtype(2 * task.graph.total_edges))
    for src, dst in edge_chunks(task, "counting degrees"):
        wrong = _count(src, dst, degree)
        if wrong >= 0:
            raise PartitionError(
                f"an edge leads from node {src[wrong]} to node {dst[wrong]}; expected nodes 0 to {num_nodes - 1}."
            )
    return degree


def index_dtype(largest: int) -> np.dtype[Any]:
    """The smaller of int32 and int64 that holds numbers up to `largest`."""
    return np.dtype(np.int32 if largest < 2**31 else np.int64)


@compiled
def _count(src: Array, dst: Array, degree: Array) -> int:
    """Add the edges to the degrees; the first edge that ends outside the graph, or -1."""
    for i in range(len(src)):
        u, v = src[i], dst[i]
        if not (0 <= u < len(degree) and 0 <= v < len(degree)):
            return i
        if u != v:
            degree[u] += 1
            degree[v] += 1
    return -1
