"""Helpers of the readers' tests: a `GraphSource` as plain arrays, and random edges."""

from typing import Any

import numpy as np

from sar.partition.graph_source import EdgeSource, GraphSource


def ends(edges: EdgeSource, rows: int = 3) -> tuple[list[int], list[int]]:
    """All edges, read in small chunks."""
    src: list[int] = []
    dst: list[int] = []
    for one, other in edges.chunks(rows):
        assert one.dtype == other.dtype == np.int64
        assert one.flags.c_contiguous
        assert other.flags.c_contiguous
        assert 0 < len(one) == len(other) <= rows or edges.num_edges == 0
        src += one.tolist()
        dst += other.tolist()
    assert len(src) == edges.num_edges
    return src, dst


def only_ends(graph: GraphSource, rows: int = 3) -> tuple[list[int], list[int]]:
    """The edges of a homogeneous graph."""
    (edges,) = graph.edges.values()
    return ends(edges, rows)


def assert_same(found: GraphSource, expected: GraphSource) -> None:
    """Types in order, counts, edges in order, and fields with their dtypes are equal."""
    assert list(found.num_nodes.items()) == list(expected.num_nodes.items())
    assert list(found.edges) == list(expected.edges)
    for etype, edges in expected.edges.items():
        assert ends(found.edges[etype]) == ends(edges)
    for mine, theirs in ((found.node_data, expected.node_data), (found.edge_data, expected.edge_data)):
        kinds: Any = {*mine, *theirs}
        for kind in kinds:
            fields, wanted = mine.get(kind, {}), theirs.get(kind, {})
            assert fields.keys() == wanted.keys()
            for name, column in wanted.items():
                assert fields[name].dtype == column.dtype
                assert fields[name].shape == column.shape
                assert np.array_equal(fields[name][0 : column.shape[0]], column[0 : column.shape[0]])


def random_edges(seed: int, num_nodes: int, num_edges: int) -> tuple[Any, Any]:
    """Sources and destinations, with duplicates and self-loops; one node has many edges."""
    random = np.random.default_rng(seed)
    src, dst = random.integers(0, num_nodes, (2, num_edges))
    src[: num_edges // 3] = 0
    dst[: num_edges // 6] = src[: num_edges // 6]
    return src, dst
