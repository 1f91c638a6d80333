"""What the files of one part of a partition directory hold, and every contradiction in them.

[Note: one part at a time]
A directory is inspected part by part, holding one `graph.dgl` and slices of features. Of the edges between parts only
counts and fingerprints are kept: sums of hashes of (edge ID, source, destination), which are equal where both parts
have stored the same edges, in whatever order. One thread does it: steps on slices are too short to divide, and where
cores are busy, threads that wait for each other after every step take ten times as long.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sar.common_tuples import EID, ETYPE, NTYPE, ORIG_ID, SPLIT, CanonicalEtype
from sar.data.arrays import StoredArray
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
from sar.data.partition_json import IdRanges, PartitionJson, graph_path
from sar.errors import PartitionError
from sar.id_slices import distinct, pieces
from sar.splitmix import STEP, mix

What = Literal["nodes", "edges"]


class EdgesBetween(NamedTuple):
    """Edges between one part and each of the others, (P,) each."""

    counts: NDArray[np.int64]
    fingerprints: NDArray[np.uint64]  # see [Note: one part at a time]

    @classmethod
    def none(cls, num_parts: int) -> "EdgesBetween":
        return cls(np.zeros(num_parts, np.int64), np.zeros(num_parts, np.uint64))


class StoredFeature(NamedTuple):
    """A feature of one type in one part: dtype by name, trailing shape, and how many rows have NaN, if counted."""

    what: What
    type_id: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    nan_rows: int | None


@dataclass
class PartContent:
    """What one part's files hold; R is 0 where its graph cannot be read."""

    problems: list[str]  # in words that begin with a file
    edges_in: EdgesBetween  # in-edges, by the part of their source
    edges_out: EdgesBetween  # to other parts, which DGL's own writer stores with both parts
    read_from: NDArray[np.int64]  # (P,) distinct nodes of each other part that in-edges come from
    edges_from: NDArray[np.int64]  # (R, P) in-edges of each type by the part of their source
    rows_from: NDArray[np.int64]  # (R, P) distinct nodes of each other part that these come from
    edge_types: list[CanonicalEtype] = field(default_factory=list)
    features: list[StoredFeature] = field(default_factory=list)
    split: dict[str, int] = field(default_factory=dict)  # nodes by mask
    orig_ids: dict[What, list[Tensor]] = field(default_factory=dict)  # in `graph.dgl` (DGL up to 0.9), by type


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: see [Note: one part at a time]."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def inspect_part(spec: PartitionJson, part: int, *, values: bool) -> PartContent:
    """Read all files of a part; with `values`, also look for NaN in features."""
    parts = spec.num_parts
    none = np.zeros((0, parts), np.int64)
    content = PartContent([], EdgesBetween.none(parts), EdgesBetween.none(parts), np.zeros(parts, np.int64), none, none)
    has_part_ids = False
    try:
        path = graph_path(spec, part)
        file = PartFile(path)
        graph = file.read()
        content.edge_types = canonical_edge_types(spec, graph, part)
    except PartitionError as error:
        content.problems.append(str(error))
    else:
        has_part_ids = PART_ID in file.nodes
        _GraphCheck(spec, part, path, content).check(file, graph)
        del graph
    for files in (
        FeatureFiles(spec, part, "nodes", has_part_ids=has_part_ids),
        FeatureFiles(spec, part, "edges", content.edge_types, has_part_ids=has_part_ids),
    ):
        _check_features(files, content, values=values)
    return content


class _GraphCheck:
    def __init__(self, spec: PartitionJson, part: int, path: Path, content: PartContent) -> None:
        self._spec = spec
        self._part = part
        self._path = path
        self._content = content

    def check(self, file: PartFile, graph: LocalGraph) -> None:
        spec, part = self._spec, self._part
        inner, ids = graph.is_inner, graph.node_id
        self._owned_once("nodes", ids[inner], spec.node_ranges)
        num_nodes = spec.partition_ranges[-1][1]
        self._report_rows("nodes have IDs outside those of all parts", (ids < 0) | (ids >= num_nodes), ids)
        start, end = spec.partition_ranges[part]
        own = (ids >= start) & (ids < end)
        self._report_rows("halo nodes are the part's own nodes", ~inner & own, ids)
        halo = ids[~inner]
        repeated = len(halo) - len(distinct(halo))
        if repeated:
            self._report(f"{repeated} halo nodes are there more than once; expected each once")
        ids = ids.clamp(0, max(num_nodes - 1, 0))
        owner = _owner(ids, spec.node_ranges)
        if PART_ID in file.nodes:
            wrong = file.nodes[PART_ID].load() != owner
            self._report_rows(f"nodes have another part_id than the ranges in {spec.path.name} say", wrong, ids)
        if NTYPE in file.nodes:
            wrong = file.nodes[NTYPE].load() != types_of(ids, spec.node_ranges)
            self._report_rows(f"nodes have another {NTYPE} than the ranges in {spec.path.name} say", wrong, ids)
        marks: dict[str, Tensor] = {key: file.edges[key].load() for key in (INNER_EDGE, ETYPE) if key in file.edges}
        self._check_edges(graph, marks, ids, owner)
        self._note_original_ids("nodes", graph.node_id, graph.orig_node_id, inner, spec.node_ranges)
        mine = inner[graph.edges[DST].long()]
        self._note_original_ids("edges", graph.edges[EID], graph.edges.get(ORIG_ID), mine, spec.edge_ranges)

    def _check_edges(self, graph: LocalGraph, marks: Mapping[str, Tensor], node_id: Tensor, owner: Tensor) -> None:
        """Check edges in chunks, and add up what comes from and goes to other parts."""
        spec, content, inner, edges = self._spec, self._content, graph.is_inner, graph.edges
        num_edges = int(spec.edge_ranges[-1, -1, 1])
        place = {name: i for i, name in enumerate(spec.node_types)}
        ends_of_type = torch.tensor(
            [(place.get(src, -1), place.get(dst, -1)) for src, _, dst in content.edge_types], device="cpu"
        )
        sources = EdgeSources(spec.partition_ranges, self._part, spec.edge_ranges.shape[1])
        wrong: dict[str, list[Tensor]] = {}
        own_ids = []
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
            goes_out = ~comes_in & inner[src]
            hashes = _hashes(ids, node_id[src], node_id[dst])
            _add(content.edges_in, owner[src[comes_in]], hashes[comes_in.numpy()])
            _add(content.edges_out, owner[dst[goes_out]], hashes[goes_out.numpy()])
        for problem, edge_ids in wrong.items():
            bad = torch.cat(edge_ids)
            if len(bad):
                self._report(f"{len(bad)} {problem}, edge {int(bad[0])} for one")
        self._owned_once("edges", torch.cat(own_ids) if own_ids else edges[EID], spec.edge_ranges)
        content.edges_from = sources.edges
        content.rows_from, content.read_from = sources.rows()

    def _owned_once(self, what: What, ids: Tensor, ranges: IdRanges) -> None:
        """Check that the IDs of a part's own nodes or edges are those of its range, each once."""
        start, end = int(ranges[self._part, 0, 0]), int(ranges[self._part, -1, 1])
        inside = (ids >= start) & (ids < end)
        self._report_rows(f"inner {what} have IDs outside [{start}, {end}), the part's own", ~inside, ids)
        seen = distinct(ids[inside])
        missing, repeated = end - start - len(seen), int(inside.sum()) - len(seen)
        if missing or repeated:
            run = int(
                (seen == torch.arange(start, start + len(seen), device="cpu")).int().cumprod(0).sum()
            )  # IDs without a gap
            first = f", {start + run} for one" if missing else ""
            self._report(
                f"of the {what} [{start}, {end}) that {self._spec.path.name} promises, {missing} are missing{first}; "
                f"{repeated} are there more than once"
            )

    def _note_original_ids(
        self, what: What, ids: Tensor, original: Tensor | None, mine: Tensor, ranges: IdRanges
    ) -> None:
        if original is not None:
            kind, ids = types_of(ids[mine], ranges), original[mine]
            self._content.orig_ids[what] = [ids[kind == type_id] for type_id in range(ranges.shape[1])]

    def _report_rows(self, problem: str, bad: Tensor, ids: Tensor) -> None:
        """Report rows that are `bad`, (n,), with the ID of the first."""
        count = int(bad.sum())
        if count:
            self._report(f"{count} {problem}, {int(ids[bad][0])} for one")

    def _report(self, problem: str) -> None:
        self._content.problems.append(f"{self._path}: {problem}.")


def _owner(ids: Tensor, ranges: IdRanges) -> Tensor:
    return torch.searchsorted(torch.from_numpy(ranges[:, -1, 1].copy()), ids, right=True)


def _hashes(*columns: Tensor) -> NDArray[np.uint64]:
    """A hash of each row of columns, (n,) int64 each."""
    state = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        state = mix(state + column.numpy().view(np.uint64) + STEP)
    return state


def _add(between: EdgesBetween, parts: Tensor, hashes: NDArray[np.uint64]) -> None:
    """Add edges to the counts and fingerprints of the parts at their other ends, (n,)."""
    np.add.at(between.fingerprints, parts.numpy(), hashes)
    between.counts[:] += np.bincount(parts.numpy(), minlength=len(between.counts))


def _check_features(files: FeatureFiles, content: PartContent, *, values: bool) -> None:
    """Note the features of a part, count what masks choose, and report wrong lengths and, if asked, NaN."""
    report: Callable[[str], None] = content.problems.append
    try:
        path, tensors = files.tensors()
    except PartitionError as error:
        report(str(error))
        return
    for key, stored in tensors.items():
        try:
            type_id, name, *_ = files.feature(path, key, stored)
        except PartitionError as error:
            report(str(error))
            continue
        if files.what == "nodes" and name in SPLIT:
            chosen = sum(int((rows != 0).sum()) for _, rows in stored.slices())
            content.split[name] = content.split.get(name, 0) + chosen
        counted = values and stored.tensor_dtype.is_floating_point
        nan_rows = _rows_with_nan(path, key, stored, report) if counted else None
        dtype = str(stored.tensor_dtype).removeprefix("torch.")
        content.features.append(StoredFeature(files.what, type_id, name, dtype, tuple(stored.shape[1:]), nan_rows))


def _rows_with_nan(path: Path, key: str, stored: StoredArray, report: Callable[[str], None]) -> int:
    count, first = 0, -1
    for start, rows in stored.slices():
        bad = (
            rows.isnan().view(len(rows), -1).any(1) if rows.numel() else torch.zeros(0, dtype=torch.bool, device="cpu")
        )
        if count == 0 and bool(bad.any()):
            first = start + int(bad.nonzero()[0])
        count += int(bad.sum())
    if count:
        report(f"{path}: {count} rows of {key!r} have NaN, row {first} for one.")
    return count


class EdgeSources:
    """Of the edges into one owner's nodes, whether a partition or a worker."""

    def __init__(self, ranges: Sequence[tuple[int, int]], own: int, num_types: int) -> None:
        self._ends = torch.tensor([end for _, end in ranges], device="cpu")
        self._own, self._shape = own, (num_types, len(ranges))
        self._num_nodes = max(ranges[-1][1], 1)
        self._read = [
            torch.empty(0, dtype=torch.int64, device="cpu")
        ]  # pairs of edge type and another's node, as one number
        self.edges: NDArray[np.int64] = np.zeros(self._shape, np.int64)  # of each type by the owner of their source

    def add(self, kind: Tensor, src: Tensor) -> None:
        """Count more edges: their types and the global IDs of their sources, (n,) int64."""
        owner = torch.searchsorted(self._ends, src, right=True)
        self.edges += self._count(kind, owner)
        others = owner != self._own
        self._read.append(distinct((kind * self._num_nodes + src)[others]))

    def rows(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Distinct nodes of each other owner that edges come from: (R, W) by edge type, and (W,) of all."""
        pairs = distinct(torch.cat(self._read))
        self._read = [pairs]
        kind, src = pairs // self._num_nodes, pairs % self._num_nodes
        every = distinct(src)
        by_type = self._count(kind, torch.searchsorted(self._ends, src, right=True))
        return by_type, np.bincount(torch.searchsorted(self._ends, every, right=True), minlength=self._shape[1])

    def _count(self, kind: Tensor, owner: Tensor) -> NDArray[np.int64]:
        num_types, owners = self._shape
        counts: NDArray[np.int64] = np.bincount(kind * owners + owner, minlength=num_types * owners)
        return counts.reshape(self._shape)
