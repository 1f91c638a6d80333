"""Graphs as tasks for partition methods."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sar.data.arrays import Array
from sar.partition.assign.task import AssignmentTask
from sar.partition.graph_source import ArrayEdges, GraphSource


def source(src: Any, dst: Any, num_nodes: int) -> GraphSource:
    edges = ArrayEdges(np.asarray(src, np.int64), np.asarray(dst, np.int64))
    return GraphSource({"_N": num_nodes}, {("_N", "_E", "_N"): edges}, {}, {})


def task_of(
    graph: GraphSource, num_parts: int, scratch: Path, weights: Mapping[str, Array] | None = None, **options: Any
) -> AssignmentTask:
    """A task in a directory of its own under `scratch`."""
    folder = scratch / f"task{len(list(scratch.iterdir()))}"
    folder.mkdir()
    return AssignmentTask(graph, num_parts, folder, weights=weights or {}, **options)


def odd_graphs() -> dict[str, GraphSource]:
    """Graphs that methods stumble over, by name."""
    rng = np.random.default_rng(0)
    leaves = np.arange(1, 200)
    return {
        "no nodes": source([], [], 0),
        "one node": source([], [], 1),
        "one node with a loop": source([0, 0], [0, 0], 1),
        "no edges": source([], [], 50),
        "loops only": source(np.arange(50), np.arange(50), 50),
        "fewer nodes than parts": source([0, 1], [1, 2], 3),
        "star": source(leaves, 0 * leaves, 200),
        "parallel edges": source(np.repeat([0, 1, 2, 3], 30), np.repeat([1, 0, 3, 2], 30), 8),
        "isolated nodes": source(*rng.integers(40, size=(2, 200)), 100),
        "two types": GraphSource(
            {"a": 30, "b": 20},
            {
                ("a", "to", "b"): ArrayEdges(rng.integers(30, size=90), rng.integers(20, size=90)),
                ("b", "of", "b"): ArrayEdges(rng.integers(20, size=40), rng.integers(20, size=40)),
            },
            {},
            {},
        ),
    }
