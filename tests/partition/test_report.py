"""What is said of partition directories of every kind, and that every damage is found and named."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from sar.errors import PartitionError
from sar.partition.graph_source import GraphSource
from sar.partition.in_memory import divide
from sar.partition.inspect.inspection import inspect_directory
from tests.adapters.dgl.directories import (
    Directory,
    dgl,
    heterogeneous_graph,
    homogeneous_graph,
    load_tensors,
    save_tensors,
    to_dispatch,
    write_directory,
)

GRAPHS = {"homogeneous": homogeneous_graph, "heterogeneous": heterogeneous_graph}
FORMATS: dict[str, tuple[Callable[[Directory], Directory], str, str | None]] = {
    "1.x": (lambda directory: directory, "dgl.distributed.partition_graph", None),
    "dispatch": (
        lambda directory: to_dispatch(directory, features=True, orig_ids=True),
        "DGL's dispatch pipeline",
        "orig_nids.dgl",
    ),
    "dispatch, bare": (
        lambda directory: to_dispatch(directory, features=False, orig_ids=False),
        "DGL's dispatch pipeline",
        None,
    ),
}


def test_labels_that_are_no_classes_are_pointed_out(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    fields = {"label": rng.random(9), "labels": np.arange(9), "y": np.ones((9, 2), np.int64), "x": rng.random((9, 4))}
    divide(GraphSource.homogeneous(np.arange(8), np.arange(1, 9), 9, fields), tmp_path, "small", 2)
    report = inspect_directory(tmp_path)
    assert report.problems == []
    assert [remark.partition(":")[0] for remark in report.remarks] == [
        "_N/label is float64 of width 1",
        "_N/y is int64 of width 2",
    ]
    assert report.summary()["remarks"] == report.remarks
    assert "\n".join([*report.remarks, "", "sound"]) in report.as_text()


@pytest.mark.parametrize("make", GRAPHS)
@pytest.mark.parametrize("written_by", FORMATS)
def test_a_sound_directory_in_numbers(tmp_path: Path, make: str, written_by: str) -> None:
    graph, parts = GRAPHS[make](), 3
    rewrite, name, original = FORMATS[written_by]
    directory = rewrite(write_directory(tmp_path, graph, parts))
    report = inspect_directory(tmp_path)
    assert report.problems == []
    assert (report.format, report.orig_node_ids, report.name, report.method) == (name, original, "graph", "random")
    assert report.num_nodes == {ntype: graph.num_nodes(ntype) for ntype in graph.ntypes}
    assert report.num_edges == {":".join(etype): graph.num_edges(etype) for etype in graph.canonical_etypes}

    # The oracle: everybody's part by original ID, and the input graph's edges.
    part_of = {}
    for ntype, ids in directory.node_ids.items():
        part_of[ntype] = np.empty(len(ids), dtype=int)
        for p, (start, end) in enumerate(split_by_part(directory, ntype)):
            part_of[ntype][ids[start:end].numpy()] = p
    edges, rows = np.zeros((parts, parts), int), np.zeros((parts, parts), int)  # [from, to]
    read: set[tuple[str, int, int]] = set()
    for etype in graph.canonical_etypes:
        src, dst = (ends.numpy() for ends in graph.edges(etype=etype))
        source, reader = part_of[etype[0]][src], part_of[etype[2]][dst]
        np.add.at(edges, (source, reader), 1)
        read |= {(etype[0], int(node), int(to)) for node, to in zip(src, reader, strict=True)}
    for ntype, node, to in read:
        if part_of[ntype][node] != to:
            rows[part_of[ntype][node], to] += 1
    assert report.traffic == rows.tolist()
    assert [part.edges_from for part in report.parts] == edges.T.tolist()
    cut = edges.sum() - np.trace(edges)
    assert report.edge_cut == pytest.approx(cut / edges.sum())
    assert report.replication_factor == pytest.approx(1 + rows.sum() / graph.num_nodes())
    nodes = np.array([part.num_nodes for part in report.parts])
    assert nodes.tolist() == sum(np.bincount(owners, minlength=parts) for owners in part_of.values()).tolist()
    assert report.balances["nodes"] == pytest.approx(nodes.max() / nodes.mean())
    assert report.balances["in-edges"] == pytest.approx(edges.sum(0).max() / edges.sum(0).mean())

    found = {(one.of, one.type, one.name): (one.dtype, one.shape) for one in report.features}
    expected = {}
    for ntype in graph.ntypes if "bare" not in written_by else []:
        for key, value in graph.nodes[ntype].data.items():
            expected["nodes", ntype, key] = (spelled(value), tuple(value.shape[1:]))
    for etype in graph.canonical_etypes if "bare" not in written_by else []:
        for key, value in graph.edges[etype].data.items():
            expected["edges", ":".join(etype), key] = (spelled(value), tuple(value.shape[1:]))
    assert found == expected


def split_by_part(directory: Directory, ntype: str) -> list[tuple[int, int]]:
    """[start, end) of each part's nodes among those of a type."""
    ends = np.cumsum([end - start for start, end in directory.json()["node_map"][ntype]]).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def spelled(value: torch.Tensor) -> str:
    return "uint8" if value.dtype == torch.bool else str(value.dtype).removeprefix("torch.")


class Ranges(NamedTuple):
    """New IDs of part 1: its nodes are [n0, n1), its in-edges [e0, e1)."""

    n0: int
    n1: int
    e0: int
    e1: int


def ranges(directory: Directory) -> Ranges:
    maps = directory.json()
    return Ranges(*maps["node_map"]["_N"][1], *maps["edge_map"]["_N:_E:_N"][1])


def edit(side: str, name: str, row: int, value: int | Callable[[Ranges], int]) -> Callable[[Directory], None]:
    """Set one entry of a field of part 1's nodes or edges."""

    def harm(directory: Directory) -> None:
        def change(graph):
            fields = graph.ndata if side == "nodes" else graph.edata
            fields[name][row] = value(ranges(directory)) if callable(value) else value
            return graph

        directory.edit_graph(1, change)

    return harm


def end_elsewhere(directory: Directory) -> None:
    """Let an in-edge of part 1 end at a halo node."""

    def change(graph):
        src, dst = graph.edges(order="eid")
        dst[0] = graph.num_nodes() - 1
        return like(graph, src, dst)

    directory.edit_graph(1, change)


def like(graph, src, dst):
    """A graph with other ends of edges, all else the same."""
    made = dgl.graph((src, dst), num_nodes=graph.num_nodes())
    made.ndata.update(graph.ndata)
    made.edata.update(graph.edata)
    return made


def double_halo(directory: Directory) -> None:
    def change(graph):
        graph.ndata["_ID"][-1] = graph.ndata["_ID"][-2]
        graph.ndata["part_id"][-1] = graph.ndata["part_id"][-2]
        return graph

    directory.edit_graph(1, change)


def widen(directory: Directory) -> None:
    directory.edit_features(1, "node_feats", lambda old: old | {"_N/feat": old["_N/feat"].double()})


def drop_feature(directory: Directory) -> None:
    directory.edit_features(1, "edge_feats", lambda old: {key: old[key] for key in old if key != "_N:_E:_N/w"})


def truncate(kind: str) -> Callable[[Directory], None]:
    def change(directory: Directory) -> None:
        path = directory.file(1, kind)
        path.write_bytes(path.read_bytes()[:-40])

    return change


DAMAGES: dict[str, tuple[Callable[[Directory], None], str, str]] = {
    "node ID of another part": (edit("nodes", "_ID", 0, 0), "part1/graph.dgl", "1 inner nodes have IDs outside"),
    "node ID twice": (
        edit("nodes", "_ID", 0, lambda r: r.n0 + 1),
        "graph.dgl",
        "1 are missing, {n0} for one",
    ),
    "halo node of its own": (
        edit("nodes", "_ID", -1, lambda r: r.n0 + 2),
        "graph.dgl",
        "1 halo nodes are the part's own",
    ),
    "halo node nowhere": (
        edit("nodes", "_ID", -1, 60),
        "graph.dgl",
        "1 nodes have IDs outside those of all parts",
    ),
    "halo node twice": (double_halo, "part1/graph.dgl", "1 halo nodes are there more than once"),
    "owner of a halo node": (edit("nodes", "part_id", -1, 1), "part1/graph.dgl", "1 nodes have another part_id"),
    "edge ID twice": (edit("edges", "_ID", 0, lambda r: r.e0 + 1), "part1/graph.dgl", "of the edges [{e0}, {e1})"),
    "edge ID of another part": (
        edit("edges", "_ID", 0, 0),
        "graph.dgl",
        "1 inner edges have IDs outside [{e0}, {e1})",
    ),
    "edge marked inner": (edit("edges", "inner_edge", -1, 1), "part1/graph.dgl", "1 edges are marked as inner"),
    "end in the halo": (end_elsewhere, "part1/graph.dgl", "of the edges [{e0}, {e1})"),
    "feature of another dtype": (widen, "part1/node_feat.dgl", "'_N/feat' is ('float64', (3,)); expected ('float32'"),
    "feature in some parts": (drop_feature, "part1/edge_feat.dgl", "there is no '_N:_E:_N/w', which part 0 has"),
    "truncated graph": (truncate("part_graph"), "part1/graph.dgl", "is truncated"),
    "missing graph": (lambda d: d.file(1, "part_graph").unlink(), "part1/graph.dgl", "lacks its graph"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_is_found_and_named(tmp_path: Path, damage: str) -> None:
    directory = write_directory(tmp_path, homogeneous_graph(), 3)
    harm, file, words = DAMAGES[damage]
    mine = ranges(directory)
    for name, number in mine._asdict().items():
        words = words.replace(f"{{{name}}}", str(number))
    harm(directory)
    problems = inspect_directory(directory.path).problems
    assert any(file in problem and words in problem for problem in problems), problems
    assert all("part1" in problem or "part2" in problem or "Partition 1" in problem for problem in problems)


@pytest.mark.parametrize(
    "damage, words",
    [
        (edit("nodes", "_TYPE", 0, 2), "1 nodes have another _TYPE than the ranges in graph.json say"),
        (edit("edges", "_TYPE", 0, 2), "1 edges have another _TYPE than the ranges in graph.json say"),
        (lambda d: d.edit(lambda c: swap(c["ntypes"], "author", "paper")), "map of .*expected a range that starts at"),
        (lambda d: d.edit(lambda c: swap_names(c)), "edges join other node types than their own type says"),
    ],
    ids=["node type", "edge type", "order of types", "names of edge types"],
)
def test_types_that_contradict_each_other(tmp_path: Path, damage: Callable[[Directory], None], words: str) -> None:
    directory = write_directory(tmp_path, heterogeneous_graph(), 2)
    damage(directory)
    try:
        problems = inspect_directory(directory.path).problems
    except PartitionError as error:
        problems = [str(error)]
    import re

    assert any(re.search(words, problem) for problem in problems), problems


def swap(names: dict[str, int], one: str, other: str) -> None:
    names[one], names[other] = names[other], names[one]


def swap_names(content: dict) -> None:
    """Turn an edge type around in name only."""
    for key in ("etypes", "edge_map"):
        content[key] = {
            "paper:writes:author" if name == "author:writes:paper" else name: value
            for name, value in content[key].items()
        }


@pytest.mark.parametrize(
    "change, words", [(lambda ids: ids.clamp(min=1), "1 are missing"), (lambda ids: ids + 1, "outside")]
)
@pytest.mark.parametrize("file", ["orig_nids.dgl", "orig_eids.dgl"])
def test_original_ids_are_a_permutation(tmp_path: Path, file: str, change, words: str) -> None:
    directory = to_dispatch(write_directory(tmp_path, homogeneous_graph(), 2), features=True, orig_ids=True)
    for part in range(2):
        path = tmp_path / f"part{part}" / file
        save_tensors(str(path), {name: change(ids) for name, ids in load_tensors(str(path)).items()})
    [problem] = inspect_directory(directory.path).problems
    assert file in problem
    assert words in problem


def test_parts_that_lack_original_ids(tmp_path: Path) -> None:
    directory = to_dispatch(write_directory(tmp_path, homogeneous_graph(), 2), features=True, orig_ids=True)
    (tmp_path / "part1" / "orig_nids.dgl").unlink()
    [problem] = inspect_directory(directory.path).problems
    assert "parts [1] lack the original IDs that others have" in problem


def test_a_directory_of_several_graphs_has_to_be_named(tmp_path: Path) -> None:
    directory = write_directory(tmp_path, homogeneous_graph(), 2)
    (tmp_path / "other.json").write_text(directory.path.read_text())
    with pytest.raises(PartitionError, match=r"2 JSON files of partitions \(graph.json, other.json\)"):
        inspect_directory(tmp_path)
    with pytest.raises(PartitionError, match=r"0 JSON files of partitions \(none\)"):
        inspect_directory(tmp_path / "part0")
