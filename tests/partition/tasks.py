"""Tasks for partition methods: small graphs, whose edges come in small chunks, and graphs that methods stumble over."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from sar.data.arrays import Array
from sar.partition.assign.task import AssignmentTask
from sar.partition.graph_source import ArrayEdges, GraphSource

Edges = list[tuple[int, int]]


@dataclass(frozen=True)
class SmallChunks(ArrayEdges):
    """Edges in chunks of seven, so that small graphs have several."""

    def chunks(self, rows: int = 7) -> Iterator[tuple[Array, Array]]:
        return super().chunks(7)


def edge_task(num_nodes: int, edges: Edges | tuple[Array, Array], num_parts: int, **options: Any) -> AssignmentTask:
    """A task on a homogeneous graph, given by pairs or by two arrays."""
    if isinstance(edges, tuple):
        source: ArrayEdges = ArrayEdges(*edges)
    else:
        src, dst = np.array(edges, np.int64).reshape(-1, 2).T
        source = SmallChunks(src, dst)
    graph = GraphSource({"_N": num_nodes}, {("_N", "_E", "_N"): source}, {}, {})
    return AssignmentTask(graph, num_parts, Path("unused"), **options)


def typed_task(num_nodes: Mapping[str, int], edges: Mapping[Any, Edges], num_parts: int) -> AssignmentTask:
    """A task on a graph of several types."""
    sources = {etype: SmallChunks(*np.array(pairs, np.int64).reshape(-1, 2).T) for etype, pairs in edges.items()}
    return AssignmentTask(GraphSource(num_nodes, sources, {}, {}), num_parts, Path("unused"))


@st.composite
def small_graphs(draw: st.DrawFn, max_nodes: int = 24, max_edges: int = 70) -> tuple[int, Edges]:
    """Number of nodes, and edges among them: with loops, repeated edges and nodes without edges; hubs are likely."""
    num_nodes = draw(st.integers(1, max_nodes))
    node = st.integers(0, num_nodes - 1)
    hub = st.integers(0, min(2, num_nodes - 1))
    edges = draw(st.lists(st.tuples(node | hub, node), max_size=max_edges))
    return num_nodes, edges


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
        "a path and isolated nodes": source([0, 1, 2], [1, 2, 499], 500),
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
