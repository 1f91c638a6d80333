"""Reads the files of one part of a partition directory, and finds every contradiction in them.

[Note: one part at a time]
A directory is inspected part by part, with one `graph.dgl` and slices of features in memory. One thread does it: steps
on slices are too short to divide, and if cores are busy, threads that wait for each other after every step take ten
times as long.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sar.common_tuples import EID, ETYPE, NTYPE, ORIG_ID, SPLIT, CanonicalEtype
from sar.data.part_files import (
    DST,
    INNER_EDGE,
    PART_ID,
    SRC,
    FeatureFiles,
    LocalGraph,
    PartFile,
    canonical_edge_types,
    types_of,
)
from sar.data.partition_json import IdRanges, PartitionJson, What, graph_path
from sar.errors import PartitionError
from sar.id_slices import distinct, pieces
from sar.partition.inspect.directory_report import FeatureReport

Ids = NDArray[np.int64]


class Reads(NamedTuple):
    """The sources of the edges into one owner's nodes, of a part or a worker; W owners, R edge types."""

    edges: Ids  # (R, W) edges by the owner of their source
    rows: Ids  # (R, W) distinct nodes of each other owner that these come from
    rows_of_all: Ids  # (W,) likewise, of all types together


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: see [Note: one part at a time]."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class EdgeSources:
    """Adds up the sources of the edges into one owner's nodes."""

    def __init__(self, ranges: Sequence[tuple[int, int]], own: int, num_types: int) -> None:
        self._ends = torch.tensor([end for _, end in ranges], device="cpu")
        self._own, self._shape = own, (num_types, len(ranges))
        self._num_nodes = max(ranges[-1][1], 1)
        # Pairs of an edge type and a node of another owner, as one number.
        self._read = [torch.empty(0, dtype=torch.int64, device="cpu")]
        self._edges: Ids = np.zeros(self._shape, np.int64)

    def add(self, kind: Tensor, src: Tensor) -> None:
        """Count more edges: their types and the global IDs of their sources, (n,) int64."""
        owner = torch.searchsorted(self._ends, src, right=True)
        self._edges += self._count(kind, owner)
        others = owner != self._own
        self._read.append(distinct((kind * self._num_nodes + src)[others]))

    def reads(self) -> Reads:
        pairs = distinct(torch.cat(self._read))
        kind, src = pairs // self._num_nodes, pairs % self._num_nodes
        by_type = self._count(kind, torch.searchsorted(self._ends, src, right=True))
        owner = torch.searchsorted(self._ends, distinct(src), right=True)
        return Reads(self._edges, by_type, np.bincount(owner, minlength=self._shape[1]))

    def _count(self, kind: Tensor, owner: Tensor) -> Ids:
        num_types, owners = self._shape
        counts: Ids = np.bincount(kind * owners + owner, minlength=num_types * owners)
        return counts.reshape(self._shape)


@dataclass
class PartContent:
    """The content of one part's files, with P parts; without edge types if its graph cannot be read."""

    reads: Reads
    problems: list[str] = field(default_factory=list)  # each begins with a file
    edge_types: list[CanonicalEtype] = field(default_factory=list)
    features: dict[tuple[What, int, str], FeatureReport] = field(default_factory=dict)  # by type ID and name
    split: dict[str, int] = field(default_factory=dict)  # nodes by mask
    files: dict[What, FeatureFiles] = field(default_factory=dict)
    orig_ids: dict[What, list[Tensor]] = field(default_factory=dict)  # in `graph.dgl` (DGL up to 0.9), by type


def inspect_part(spec: PartitionJson, part: int, values: bool) -> PartContent:
    """Read all files of a part; with `values`, also look for NaN in features."""
    parts = spec.num_parts
    none, zeros = np.zeros((0, parts), np.int64), np.zeros(parts, np.int64)
    content = PartContent(Reads(none, none, zeros))
    has_part_ids = False
    try:
        file = PartFile(graph_path(spec, part))
        graph = file.read()
        content.edge_types = canonical_edge_types(spec, graph, part)
    except PartitionError as error:
        content.problems.append(str(error))
    else:
        has_part_ids = PART_ID in file.nodes
        _GraphCheck(spec, part, content).check(file, graph)
        del graph
    for files in (
        FeatureFiles(spec, part, "nodes", has_part_ids=has_part_ids),
        FeatureFiles(spec, part, "edges", content.edge_types, has_part_ids=has_part_ids),
    ):
        content.files[files.what] = files
        _check_features(files, content, values)
    return content


@dataclass
class _GraphCheck:
    """The checks of one `graph.dgl`."""

    spec: PartitionJson
    part: int
    content: PartContent

    def check(self, file: PartFile, graph: LocalGraph) -> None:
        """Note problems, edges and original IDs in `content`."""
        spec, inner, node_id = self.spec, graph.is_inner, graph.node_id
        self.check_owned("nodes", node_id[inner], spec.node_ranges)
        start, end = spec.partition_ranges[self.part]
        num_nodes = spec.partition_ranges[-1][1]
        ids = node_id.clamp(0, max(num_nodes - 1, 0))
        owner = _owner(ids, spec.node_ranges)
        wrong = {
            "nodes have IDs outside those of all parts": (node_id < 0) | (node_id >= num_nodes),
            "halo nodes are the part's own": ~inner & (node_id >= start) & (node_id < end),
        }
        for name, expected in ((PART_ID, owner), (NTYPE, types_of(ids, spec.node_ranges))):
            if name in file.nodes:
                problem = f"nodes have another {name} than the ranges in {spec.path.name} say"
                wrong[problem] = file.nodes[name].load() != expected
        for problem, rows in wrong.items():
            self.report_rows(problem, node_id[rows])
        if repeated := int((~inner).sum()) - len(distinct(node_id[~inner])):
            self.report(f"{repeated} halo nodes are there more than once; expected each once")
        self.check_edges(file, graph, ids, owner)
        own = inner[graph.edges[DST].long()]
        for what, numbers, original, mine, ranges in (
            ("nodes", node_id, graph.orig_node_id, inner, spec.node_ranges),
            ("edges", graph.edges[EID], graph.edges.get(ORIG_ID), own, spec.edge_ranges),
        ):
            if original is not None:
                kinds, original = types_of(numbers[mine], ranges), original[mine]
                self.content.orig_ids[what] = [original[kinds == kind] for kind in range(ranges.shape[1])]  # type: ignore[index]

    def check_edges(self, file: PartFile, graph: LocalGraph, node_id: Tensor, owner: Tensor) -> None:
        """Check edges in chunks, and add up those that come from other parts."""
        spec, content, inner, edges = self.spec, self.content, graph.is_inner, graph.edges
        marks = {key: file.edges[key].load() for key in (INNER_EDGE, ETYPE) if key in file.edges}
        num_edges = int(spec.edge_ranges[-1, -1, 1])
        place = {name: i for i, name in enumerate(spec.node_types)}
        ends_of_type = torch.tensor(
            [(place.get(src, -1), place.get(dst, -1)) for src, _, dst in content.edge_types], device="cpu"
        )
        sources = EdgeSources(spec.partition_ranges, self.part, spec.edge_ranges.shape[1])
        wrong: dict[str, list[Tensor]] = {}
        own_ids = [edges[EID][:0]]
        for chunk in pieces(len(edges[EID])):
            src, dst, ids = (edges[key][chunk].long() for key in (SRC, DST, EID))
            comes_in = inner[dst]
            own_ids.append(ids[comes_in])
            known = ids.clamp(0, max(num_edges - 1, 0))
            kind = types_of(known, spec.edge_ranges).long()
            sources.add(kind[comes_in], node_id[src[comes_in]])
            elsewhere = ~comes_in & (_owner(known, spec.edge_ranges) != owner[dst])
            found = {f"edges end at nodes of other parts than the ranges in {spec.path.name} say": elsewhere}
            if INNER_EDGE in marks:
                misses_mark = marks[INNER_EDGE][chunk].bool() != comes_in
                found["edges are marked as inner and end at halo nodes, or the other way round"] = misses_mark
            if ETYPE in marks:
                other_type = marks[ETYPE][chunk] != kind
                found[f"edges have another {ETYPE} than the ranges in {spec.path.name} say"] = other_type
            ends = torch.stack([types_of(node_id[of_end], spec.node_ranges) for of_end in (src, dst)], dim=1)
            found["edges join other node types than their own type says"] = (ends_of_type[kind] != ends).any(1)
            for problem, rows in found.items():
                wrong.setdefault(problem, []).append(ids[rows])
        for problem, edge_ids in wrong.items():
            self.report_rows(problem, torch.cat(edge_ids), "edge ")
        self.check_owned("edges", torch.cat(own_ids), spec.edge_ranges)
        content.reads = sources.reads()

    def check_owned(self, what: What, ids: Tensor, ranges: IdRanges) -> None:
        """Check that the IDs of a part's own nodes or edges are those of its range, each once."""
        start, end = int(ranges[self.part, 0, 0]), int(ranges[self.part, -1, 1])
        inside = (ids >= start) & (ids < end)
        self.report_rows(f"inner {what} have IDs outside [{start}, {end}), the part's own", ids[~inside])
        seen = distinct(ids[inside])
        missing, repeated = end - start - len(seen), int(inside.sum()) - len(seen)
        if missing or repeated:
            without_gap = int((seen == torch.arange(start, start + len(seen), device="cpu")).int().cumprod(0).sum())
            first = f", {start + without_gap} for one" if missing else ""
            self.report(
                f"of the {what} [{start}, {end}) that {self.spec.path.name} promises, {missing} are missing{first}; "
                f"{repeated} are there more than once"
            )

    def report_rows(self, problem: str, bad: Tensor, kind: str = "") -> None:
        """Report the IDs that have a problem, (n,), by the first."""
        if len(bad):
            self.report(f"{len(bad)} {problem}, {kind}{int(bad[0])} for one")

    def report(self, problem: str) -> None:
        self.content.problems.append(f"{self.spec.files[self.part]['part_graph']}: {problem}.")


def _owner(ids: Tensor, ranges: IdRanges) -> Tensor:
    return torch.searchsorted(torch.from_numpy(ranges[:, -1, 1].copy()), ids, right=True)


def _check_features(files: FeatureFiles, content: PartContent, values: bool) -> None:
    """Note the features of a part, count what masks choose, and report wrong lengths and, if asked, NaN."""
    problems = content.problems
    try:
        path, tensors = files.tensors()
    except PartitionError as error:
        problems.append(str(error))
        return
    for key, stored in tensors.items():
        try:
            type_id, name, *_ = files.feature(path, key, stored)
        except PartitionError as error:
            problems.append(str(error))
            continue
        if files.what == "nodes" and name in SPLIT:
            chosen = sum(int((rows != 0).sum()) for _, rows in stored.slices())
            content.split[name] = content.split.get(name, 0) + chosen
        nan_rows = None
        if values and stored.tensor_dtype.is_floating_point:
            first, nan_rows = -1, 0
            for start, rows in stored.slices():
                bad = rows.isnan().view(len(rows), -1).any(1).nonzero() if rows.numel() else rows[:0]
                first = start + int(bad[0]) if len(bad) and not nan_rows else first
                nan_rows += len(bad)
            if nan_rows:
                problems.append(f"{path}: {nan_rows} rows of {key!r} have NaN, row {first} for one.")
        dtype = str(stored.tensor_dtype).removeprefix("torch.")
        found = FeatureReport(files.what, "", name, dtype, tuple(stored.shape[1:]), nan_rows)
        content.features[files.what, type_id, name] = found
