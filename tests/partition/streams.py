"""Tasks for partition methods on small graphs, whose edges come in small chunks."""

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
