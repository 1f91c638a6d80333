"""Helpers of the readers' tests: files, a `GraphSource` as plain arrays, and random edges."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from sar.cli import main
from sar.partition.graph_source import EdgeSource, GraphSource
from sar.partition.ingest.open import open_graph


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


ONE = ("_N", "_E", "_N")


def file_of(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def parquet(folder: Path, name: str, columns: dict[str, Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / name)
    return folder / name


def edges_of(folder: Path, num_nodes: int = 3) -> Path:
    """The file of a ring."""
    lines = "".join(f"{i},{(i + 1) % num_nodes}\n" for i in range(num_nodes))
    return file_of(folder, "edges.csv", f"src,dst\n{lines}")


def read(path: Any, **options: Any) -> GraphSource:
    first = path if isinstance(path, Path) else path[0] if isinstance(path, list) else next(iter(path.values()))
    return open_graph(path, first.parent / "scratch", **options)


def pairs(graph: GraphSource) -> list[tuple[int, int]]:
    return list(zip(*only_ends(graph), strict=True))


def named(graph: GraphSource) -> list[tuple[Any, Any]]:
    """The edges by the IDs that nodes have in the input."""
    rows = graph.node_data["_N"]["id"][:]
    ids = rows.tolist() if rows.ndim == 1 else [row.tobytes().rstrip(b"\0").decode() for row in rows]
    return [(ids[u], ids[v]) for u, v in pairs(graph)]


def values(graph: GraphSource, name: str) -> list[Any]:
    return graph.node_data["_N"][name][:].tolist()


def weights(graph: GraphSource) -> list[Any]:
    return graph.edge_data[ONE]["w"][:].tolist()


def command(*arguments: Any) -> int:
    return main([str(one) for one in arguments])
