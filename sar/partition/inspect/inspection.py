"""Inspects a partition directory: its contents, inconsistencies, and the rows that parts read from each other.

[Note: one part at a time]
A directory is inspected part by part, with one `graph.dgl` and slices of features in memory.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sar.common_tuples import EID, ETYPE, NTYPE, SPLIT, StrPath
from sar.data.arrays import Array
from sar.data.checksums import SUMS, find_damage
from sar.data.part_files import DST, INNER_EDGE, PART_ID, SRC, Feature, FeatureFiles, LocalGraph, PartFile, types_of
from sar.data.partition_json import (
    DISPATCH_JSON,
    ORIG_ID_FILES,
    IdRanges,
    PartitionJson,
    What,
    graph_path,
    owned_counts,
    read_partition_json,
)
from sar.errors import PartitionError
from sar.partition.inspect.report import DirectoryReport, FeatureReport, PartReport
from sar.tensors.id_arrays import first_of_equals, pieces

KINDS: tuple[What, What] = ("nodes", "edges")


def inspect_directory(path: StrPath, *, verify: bool = False, graphs: bool = True) -> DirectoryReport:
    """Report the contents of a partition directory, and check that its files are consistent.

    Holds one part's `graph.dgl` at a time and, to check original IDs, one byte per node and edge.

    Args:
        path: the directory's JSON file, or the directory.
        verify: also verify the checksums of all files.
        graphs: also read the graphs and original IDs. If False, `edges_from` and `rows_from` are empty, and `counts`
            come from the JSON file.

    Returns:
        The report; the directory is sound if its `problems` are empty.

    Raises:
        PartitionError: the JSON file is missing or damaged, names a file outside its directory, or its ID ranges
            are inconsistent.
    """
    spec = read_partition_json(path)
    problems: list[str] = []
    for folder in [next(iter(files.values())).parent for files in spec.files if files] if verify else []:
        problems += find_damage(folder)
        if not (folder / SUMS).exists():
            problems.append(
                f"{folder} has no {SUMS}: there are no checksums to verify its files by, as sar writes them."
            )
    features: list[dict[tuple[What, int, str], FeatureReport]] = []
    parts: list[PartReport] = []
    counts = np.zeros((2, len(spec.edge_types), spec.num_parts, spec.num_parts), np.int64)
    for part in range(spec.num_parts):
        edges_from: list[int] = []
        rows_from: list[int] = []
        if graphs:
            counts[:, :, part], rows_from = _check_graph(spec, part, problems)
            edges_from = counts[0, :, part].sum(0).tolist()
        features.append({})
        split: dict[str, int] = {}
        for what in KINDS:
            _check_features(FeatureFiles(spec, part, what), features[-1], split, problems)
        nodes, in_edges = (
            dict(zip(names, owned_counts(ranges, part), strict=True)) for names, ranges in map(spec.types, KINDS)
        )
        parts.append(PartReport(nodes, in_edges, edges_from, rows_from, split))
    originals = [_check_original_ids(spec, what, problems) if graphs else ORIG_ID_FILES[what] for what in KINDS]
    num_nodes, num_edges = (
        dict(zip(names, (ranges[..., 1] - ranges[..., 0]).sum(0).tolist(), strict=True))
        for names, ranges in map(spec.types, KINDS)
    )
    dispatched = spec.path.name == DISPATCH_JSON
    return DirectoryReport(
        name=spec.name,
        method=spec.method,
        format="DGL's dispatch pipeline" if dispatched else "dgl.distributed.partition_graph",
        orig_node_ids=originals[0],
        orig_edge_ids=originals[1],
        num_nodes=num_nodes,
        num_edges=num_edges,
        features=_joined_features(spec, features, problems),
        parts=parts,
        problems=problems,
        counts=counts if graphs else spec.counts,
    )


def largest_value(path: StrPath, name: str) -> float:
    """The greatest value of a node feature over all parts, read in slices; `PartitionError` if no part has a value."""
    spec = read_partition_json(path)
    found = [
        float(rows.max())
        for part in range(spec.num_parts)
        for one in FeatureFiles(spec, part, "nodes").features()
        if one.name == name and one.stored.dtype.kind != "V"
        for _, rows in one.stored.slices()
        if rows.size
    ]
    if not found:
        raise PartitionError(f"{spec.path}: no part has values of {name!r}.")
    return max(found)


def _check_graph(spec: PartitionJson, part: int, problems: list[str]) -> tuple[Array, list[int]]:
    """Check one `graph.dgl`; returns the `counts` of its part, (2, R, P), and its `rows_from`.

    If the graph cannot be read, they are zeros.
    """
    try:
        file = PartFile(graph_path(spec, part))
        graph = file.read()
    except PartitionError as error:
        problems.append(str(error))
        return np.zeros((2, len(spec.edge_types), spec.num_parts), np.int64), [0] * spec.num_parts
    found = _GraphProblems(spec, part)
    inner, node_id = graph.is_inner, graph.node_id
    start, end = spec.partition_ranges[part]
    num_nodes = spec.partition_ranges[-1][1]
    ids = node_id.clip(0, max(num_nodes - 1, 0))
    owner = np.searchsorted(spec.node_ranges[:, -1, 1], ids, side="right")
    found.check_owned("nodes", node_id[inner], spec.node_ranges)
    found.add("nodes have IDs outside those of all parts", node_id[(node_id < 0) | (node_id >= num_nodes)])
    found.add("halo nodes are the part's own", node_id[~inner & (node_id >= start) & (node_id < end)])
    for name, expected in ((PART_ID, owner), (NTYPE, types_of(ids, spec.node_ranges))):
        if name in file.nodes:
            other = node_id[file.nodes[name][:] != expected]
            found.add(f"nodes have another {name} than the ranges in {spec.path.name} say", other)
    halo = np.sort(node_id[~inner])
    found.add("halo nodes are there more than once", halo[~first_of_equals(halo)])
    edges_from, is_read = _check_edges(file, graph, ids, owner, found)
    problems += found.problems
    is_read &= ~inner

    def by_owner(nodes: Any) -> list[int]:
        return np.bincount(owner[nodes], minlength=spec.num_parts).tolist()

    return np.stack([edges_from, [by_owner(nodes) for nodes in is_read]]), by_owner(is_read.any(0))


def _check_edges(
    file: PartFile, graph: LocalGraph, node_id: Array, owner: Array, found: "_GraphProblems"
) -> tuple[Array, Array]:
    """Check edges in chunks.

    Returns the part's in-edges by type and the part of their source, (R, P), and the sources of each type, (R, nodes).
    """
    spec, inner, edges = found.spec, graph.is_inner, graph.edges
    marks = {key: file.edges[key][:] for key in (INNER_EDGE, ETYPE) if key in file.edges}
    num_edges = int(spec.edge_ranges[-1, -1, 1])
    place = {name: i for i, name in enumerate(spec.node_types)}
    ends_of_type = np.array([(place[src], place[dst]) for src, _, dst in spec.edge_types])
    node_type = types_of(node_id, spec.node_ranges)
    edges_from = np.zeros((len(spec.edge_types), spec.num_parts), np.int64)
    is_read = np.zeros((len(spec.edge_types), len(node_id)), np.bool_)
    wrong: dict[str, list[Array]] = {}
    own_ids = [edges[EID][:0]]
    for chunk in pieces(len(edges[EID])):
        src, dst, ids = (edges[key][chunk] for key in (SRC, DST, EID))
        comes_in = inner[dst]
        own_ids.append(ids[comes_in])
        kind = types_of(ids.clip(0, max(num_edges - 1, 0)), spec.edge_ranges)
        place_of = kind[comes_in] * spec.num_parts + owner[src[comes_in]]
        edges_from += np.bincount(place_of, minlength=edges_from.size).reshape(edges_from.shape)
        is_read[kind[comes_in], src[comes_in]] = True
        checks = {}
        if INNER_EDGE in marks:
            misses_mark = marks[INNER_EDGE][chunk].astype(np.bool_) != comes_in
            checks["edges are marked as inner and end at halo nodes, or the other way round"] = misses_mark
        if ETYPE in marks:
            checks[f"edges have another {ETYPE} than the ranges in {spec.path.name} say"] = marks[ETYPE][chunk] != kind
        ends = np.stack([node_type[src], node_type[dst]], axis=1)
        checks["edges join other node types than their own type says"] = (ends_of_type[kind] != ends).any(1)
        for problem, rows in checks.items():
            wrong.setdefault(problem, []).append(ids[rows])
    for problem, edge_ids in wrong.items():
        found.add(problem, np.concatenate(edge_ids), "edge ")
    found.check_owned("edges", np.concatenate(own_ids), spec.edge_ranges)
    return edges_from, is_read


@dataclass
class _GraphProblems:
    """Descriptions of the problems of one `graph.dgl`."""

    spec: PartitionJson
    part: int
    problems: list[str] = field(default_factory=list)

    def add(self, problem: str, bad: Array, kind: str = "") -> None:
        """Add a problem if any IDs, (n,), have it. Names the first one."""
        if len(bad):
            self._add(f"{len(bad)} {problem}, {kind}{int(bad[0])} for one")

    def check_owned(self, what: What, ids: Array, ranges: IdRanges) -> None:
        """Check that the IDs of a part's own nodes or edges are exactly those of its range."""
        start, end = int(ranges[self.part, 0, 0]), int(ranges[self.part, -1, 1])
        inside = (ids >= start) & (ids < end)
        self.add(f"inner {what} have IDs outside [{start}, {end}), the part's own", ids[~inside])
        seen = np.sort(ids[inside])
        seen = seen[first_of_equals(seen)]
        missing, repeated = end - start - len(seen), int(inside.sum()) - len(seen)
        if missing or repeated:
            without_gap = int((seen == np.arange(start, start + len(seen))).cumprod().sum())
            first = f", {start + without_gap} for one" if missing else ""
            self._add(
                f"of the {what} [{start}, {end}) that {self.spec.path.name} promises, {missing} are missing{first}; "
                f"{repeated} are there more than once"
            )

    def _add(self, problem: str) -> None:
        self.problems.append(f"{self.spec.files[self.part]['part_graph']}: {problem}.")


def _check_features(
    files: FeatureFiles,
    features: dict[tuple[What, int, str], FeatureReport],
    split: dict[str, int],
    problems: list[str],
) -> None:
    """Record the features of a part by type ID and name, and count the nodes in masks."""
    try:
        found = files.features()
    except PartitionError as error:
        problems.append(str(error))
        return
    names, _ = files.spec.types(files.what)
    for type_id, name, stored, _ in found:
        if files.what == "nodes" and name in SPLIT:
            split[name] = split.get(name, 0) + sum(int(np.count_nonzero(rows)) for _, rows in stored.slices())
        report = FeatureReport(files.what, names[type_id], name, stored.dtype_name, tuple(stored.shape[1:]))
        features[files.what, type_id, name] = report


def _joined_features(
    spec: PartitionJson, features: list[dict[tuple[What, int, str], FeatureReport]], problems: list[str]
) -> list[FeatureReport]:
    """List each feature as in the first part that has it; missing or different features are problems."""
    joined = {key: (part, one) for part, of_part in reversed([*enumerate(features)]) for key, one in of_part.items()}
    for (what, type_id, name), (first_part, first) in joined.items():
        kind = "node_feats" if what == "nodes" else "edge_feats"
        for part, of_part in enumerate(features):
            file, found = spec.files[part].get(kind, spec.path), of_part.get((what, type_id, name))
            if found is None and owned_counts(spec.types(what)[1], part)[type_id]:
                problems.append(f"{file}: there is no '{first.type}/{name}', which part {first_part} has.")
            if found is not None and found != first:
                form, expected = (found.dtype, found.shape), (first.dtype, first.shape)
                problems.append(
                    f"{file}: '{first.type}/{name}' is {form}; expected {expected}, as in part {first_part}."
                )
    order = sorted(joined, key=lambda key: (key[0] != "nodes", key[1]))
    return [joined[key][1] for key in order]


def _check_original_ids(spec: PartitionJson, what: What, problems: list[str]) -> str | None:
    """Check that the original IDs of each type are 0 to N - 1, each exactly once.

    Returns the name of their file; None if no part has it.
    """
    names, ranges = spec.types(what)
    found: list[Feature] = []
    lacking: list[int] = []  # parts
    unreadable = False
    for part in range(spec.num_parts):
        try:
            of_part = FeatureFiles(spec, part, what).original_ids()
        except PartitionError as error:
            problems.append(str(error))
            unreadable = True
            continue
        found += of_part
        if not of_part and any(owned_counts(ranges, part)):
            lacking.append(part)
    file = f"{spec.path.parent}/part*/{ORIG_ID_FILES[what]}"
    if found and lacking:
        problems.append(f"{file}: parts {lacking} lack the original IDs that others have.")
    if not found or lacking or unreadable:
        return ORIG_ID_FILES[what] if found or unreadable else None
    for type_id, name in enumerate(names):
        total = int((ranges[:, type_id, 1] - ranges[:, type_id, 0]).sum())  # equals the number of rows in the files
        seen, outside = np.zeros(total, np.bool_), 0
        for ids in (rows for one in found if one.type_id == type_id for _, rows in one.stored.slices()):
            inside = ids[(ids >= 0) & (ids < total)]
            outside += len(ids) - len(inside)
            seen[inside] = True
        if missing := total - int(np.count_nonzero(seen)):
            problems.append(
                f"{file}: the original IDs of the {what} of type {name!r} are not 0 to {total - 1}, each once: "
                f"{missing} are missing, {missing - outside} are there again, {outside} are outside."
            )
    return ORIG_ID_FILES[what]
