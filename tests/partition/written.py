"""Graphs to write, as a `GraphSource` gives them, conditions to write under, and a check of what was written."""

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from sar.adapters.dgl.shim import require_dgl
from sar.data.arrays import Array
from sar.data.tensor_files import ArrayWriter
from sar.partition.graph_source import ArrayEdges, GraphSource
from sar.partition.ingest.edges import NpyEdges, NpyFile
from sar.partition.write import write_job
from sar.partition.write.write import PartitionReport, write_partitions

dgl = require_dgl()

from dgl.data.utils import load_tensors  # noqa: E402


def of_two_files(edges: ArrayEdges) -> NpyEdges:
    """The same edges, as if they came in two files."""
    cut = edges.num_edges // 3
    one, other = ([edges.src[span], edges.dst[span]] for span in (slice(cut), slice(cut, None)))
    return NpyEdges([NpyFile("one file", one), NpyFile("another", other)])


def random_source(
    seed: int,
    counts: Mapping[str, int],
    relations: Mapping[tuple[str, str, str], int],
    *,
    two_files: bool = False,
) -> GraphSource:
    """A multigraph with self-loops and fields of all sorts; some nodes and some types may be without edges."""
    rng = np.random.default_rng(seed)
    edges, edge_data, node_data = {}, {}, {}
    for number, (etype, count) in enumerate(relations.items()):
        count = count if counts[etype[0]] and counts[etype[2]] else 0
        ends = [rng.integers(0, max(1, counts[ntype]), count) for ntype in (etype[0], etype[2])]
        found = ArrayEdges(*ends)
        edges[etype] = of_two_files(found) if two_files else found
        if number % 2 == 0:
            edge_data[etype] = {"w": rng.random((count, 2)), "kept": rng.random(count) < 0.5}
    for number, (ntype, count) in enumerate(counts.items()):
        fields = {"feat": rng.random((count, 3)).astype(">f4"), "mask": rng.random(count) < 0.5}
        fields |= {"cube": rng.random((count, 2, 2)).astype(np.float16), "none": np.zeros((count, 0))}
        node_data[ntype] = fields if number % 2 == 0 else {"label": rng.integers(-9, 9, count, dtype=np.int8)}
    return GraphSource(dict(counts), edges, node_data, edge_data)


TYPES = ("b", "a", "c")


@st.composite
def sources(draw: st.DrawFn) -> tuple[GraphSource, Array, int]:
    """A graph of one to three node types, an assignment, and a number of parts, of which some may be empty."""
    counts = {ntype: draw(st.integers(0, 12)) for ntype in TYPES[: draw(st.integers(1, 3))]}
    ntypes = list(counts)
    relations = {
        (draw(st.sampled_from(ntypes)), f"r{i}", draw(st.sampled_from(ntypes))): draw(st.integers(0, 40))
        for i in range(draw(st.integers(1, 3)))
    }
    graph = random_source(draw(st.integers(0, 99)), counts, relations, two_files=draw(st.booleans()))
    num_parts = draw(st.integers(1, 5))
    part = st.integers(0, num_parts - 1)
    part_of = draw(st.lists(part, min_size=graph.total_nodes, max_size=graph.total_nodes))
    return graph, np.array(part_of, dtype=draw(st.sampled_from([np.int64, np.uint8, np.int32]))), num_parts


def check_directory(
    folder: Path,
    name: str,
    graph: GraphSource,
    part_of: Array,
    num_parts: int,
    num_hops: int | None = None,
    place: Array | None = None,
) -> None:
    """Compare everything in a directory, as DGL reads the files, with the graph; `place` as in `NodeNumbering.of`."""
    content = json.loads((folder / f"{name}.json").read_text())
    ntypes, etypes = list(graph.num_nodes), list(graph.edges)
    assert content["ntypes"] == {ntype: i for i, ntype in enumerate(ntypes)}
    assert content["etypes"] == {":".join(etype): i for i, etype in enumerate(etypes)}
    assert (content["num_parts"], content["num_nodes"]) == (num_parts, graph.total_nodes)
    assert (content["num_edges"], content["halo_hops"]) == (graph.total_edges, num_hops or 1)
    ends = {
        etype: [np.concatenate(end) for end in zip(*_all(edges), strict=True)] for etype, edges in graph.edges.items()
    }
    part_of_type = {t: part_of[first : first + graph.num_nodes[t]] for t, first in graph.first_node.items()}
    by_place = {
        t: np.arange(count) if place is None else np.argsort(place[graph.nodes_of(t)], kind="stable")
        for t, count in graph.num_nodes.items()
    }
    nodes = {(p, t): by_place[t][part_of_type[t][by_place[t]] == p] for p in range(num_parts) for t in ntypes}
    into = {(p, e): np.flatnonzero(part_of_type[e[2]][ends[e][1]] == p) for p in range(num_parts) for e in etypes}
    new_id = {t: np.full(graph.num_nodes[t], -1) for t in ntypes}
    reached = 0
    for part in range(num_parts):
        for ntype in ntypes:
            ids = nodes[part, ntype]
            assert content["node_map"][ntype][part] == [reached, reached + len(ids)]
            new_id[ntype][ids] = np.arange(reached, reached + len(ids))
            reached += len(ids)
    everywhere = [(part, number) for part in range(num_parts) for number in range(len(etypes))]
    all_src, all_dst = (
        np.concatenate([new_id[etypes[r][2 * e]][ends[etypes[r]][e][into[p, etypes[r]]]] for p, r in everywhere])
        for e in (0, 1)
    )
    all_kinds = np.repeat([r for _, r in everywhere], [len(into[p, etypes[r]]) for p, r in everywhere])
    reached = 0
    for part in range(num_parts):
        files = {kind: folder / file for kind, file in content[f"part-{part}"].items()}
        original = _tensors(files["part_graph"].parent / "orig_nids.dgl")
        _same(original, {t: nodes[part, t] for t in ntypes})
        _same(_tensors(files["part_graph"].parent / "orig_eids.dgl"), {":".join(e): into[part, e] for e in etypes})
        node_fields = {(t, key): column for t in ntypes for key, column in graph.node_data.get(t, {}).items()}
        _same(_tensors(files["node_feats"]), {f"{t}/{k}": c[nodes[part, t]] for (t, k), c in node_fields.items()})
        edge_fields = {(e, key): column for e in etypes for key, column in graph.edge_data.get(e, {}).items()}
        expected = {f"{':'.join(e)}/{k}": c[into[part, e]] for (e, k), c in edge_fields.items()}
        _same(_tensors(files["edge_feats"]), expected)

        src = np.concatenate([new_id[e[0]][ends[e][0][into[part, e]]] for e in etypes])
        inner = np.concatenate([new_id[t][nodes[part, t]] for t in ntypes])
        near = np.isin(all_dst, inner)
        for _ in range(1, num_hops or 1):
            near |= np.isin(all_dst, all_src[near])
        outer = (near | np.isin(all_src, inner) if num_hops else near) & ~np.isin(all_dst, inner)
        halo = np.setdiff1d(np.concatenate([src, all_src[outer], all_dst[outer]]), inner)
        [local], _ = dgl.load_graphs(str(files["part_graph"]))
        ids, kinds, owners = (
            np.concatenate([inner, halo]),
            np.empty(graph.total_nodes, int),
            np.empty(graph.total_nodes, int),
        )
        for i, ntype in enumerate(ntypes):
            kinds[new_id[ntype]], owners[new_id[ntype]] = i, part_of_type[ntype]
        fields = {"_ID": ids, "_TYPE": kinds[ids].astype(np.int32), "part_id": owners[ids]}
        _same(local.ndata, fields | {"inner_node": (np.arange(len(ids)) < len(inner)).astype(np.uint8)})
        sizes = [len(into[part, e]) for e in etypes]
        assert [content["edge_map"][":".join(e)][part] for e in etypes] == [
            [reached + sum(sizes[:i]), reached + sum(sizes[: i + 1])] for i in range(len(sizes))
        ]
        ids_of_edges = np.concatenate([np.arange(reached, reached + sum(sizes)), np.flatnonzero(outer)])
        fields = {"_ID": ids_of_edges, "inner_edge": (np.arange(len(ids_of_edges)) < sum(sizes)).astype(np.uint8)}
        _same(local.edata, fields | {"_TYPE": all_kinds[ids_of_edges].astype(np.int32)})
        found_src, found_dst = (end.numpy() for end in local.edges(order="eid"))
        assert np.array_equal(ids[found_src], all_src[ids_of_edges])
        assert np.array_equal(ids[found_dst], all_dst[ids_of_edges])
        reached += sum(sizes)
    assert {file.name for file in folder.iterdir()} >= {f"{name}.json", *(f"part{p}" for p in range(num_parts))}


def content_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def _all(edges: object) -> Iterator[tuple[Array, Array]]:
    yield np.zeros(0, np.int64), np.zeros(0, np.int64)
    yield from edges.chunks()  # type: ignore[attr-defined]


def _tensors(file: Path) -> dict[str, object]:
    return load_tensors(str(file))


def _same(found: Mapping[str, object], expected: Mapping[str, Array]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        actual = found[key].numpy()  # type: ignore[attr-defined]
        value = value.astype(np.uint8) if value.dtype == bool else value.astype(value.dtype.newbyteorder("="))
        assert actual.dtype == value.dtype, key
        assert np.array_equal(actual, value), key


COUNTS = {"paper": 50, "author": 31, "prize": 1, "editor": 0}
RELATIONS = {
    ("paper", "cites", "paper"): 200,
    ("author", "writes", "paper"): 150,
    ("paper", "wins", "prize"): 3,
    ("editor", "accepts", "paper"): 0,
}
PARTS = 4


def typed_graph() -> GraphSource:
    return random_source(0, COUNTS, RELATIONS)


def small_types() -> GraphSource:
    """Types with fewer nodes and relations with fewer edges than parts, or none at all."""
    rng = np.random.default_rng(0)
    counts = {"paper": 60, "author": 25, "prize": 1, "editor": 0}
    relations = {
        ("author", "writes", "paper"): 150,
        ("paper", "cites", "paper"): 200,
        ("paper", "wins", "prize"): 2,
        ("prize", "honours", "author"): 1,
        ("editor", "accepts", "paper"): 0,
    }
    edges = {
        e: ArrayEdges(rng.integers(0, max(1, counts[e[0]]), n), rng.integers(0, counts[e[2]], n))
        for e, n in relations.items()
    }
    fields = {"paper": {"label": np.arange(60)}, "author": {"feat": rng.random((25, 3))}}
    return GraphSource(counts, edges, fields, {})


def some_assignment(graph: GraphSource) -> Array:
    """Part 2 of 4 stays empty, and most parts lack some type."""
    return np.array([0, 1, 3])[np.random.default_rng(1).integers(0, 3, graph.total_nodes)]


def write(graph: GraphSource, folder: Path, **options: object) -> PartitionReport:
    return write_partitions(graph, some_assignment(graph), PARTS, folder, "graph", method="custom", **options)  # type: ignore[arg-type]


def use_small_slices(set_attribute: Callable[[object, str, object], None] = setattr) -> None:
    """The writer takes slices of a few rows."""
    set_attribute(write_job, "_SLICE_BYTES", 1000)
    set_attribute(write_job, "_ROWS", 5)


class SmallDisk:
    """Fails when it is written to for the n-th time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, until: int) -> None:
        append = ArrayWriter.append

        def limited(writer: ArrayWriter, rows: Array) -> None:
            nonlocal until
            until -= 1
            if until < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            append(writer, rows)

        monkeypatch.setattr(ArrayWriter, "append", limited)
