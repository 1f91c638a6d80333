"""Reads a whole partition directory: its content, every contradiction in it, and who reads how much of whom."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sar.common_tuples import EID, SPLIT, StrPath
from sar.data.checksums import SUMS, find_damage
from sar.data.part_files import (
    DST,
    SRC,
    FeatureFiles,
    PartFile,
    types_of,
)
from sar.data.partition_json import (
    DISPATCH_JSON,
    ORIG_ID_FILES,
    PartitionJson,
    graph_path,
    owned_counts,
    read_partition_json,
)
from sar.data.regroup import WorkerShare
from sar.errors import ConfigError, PartitionError
from sar.id_slices import first_of_equals, pieces
from sar.partition.inspect.directory_report import DirectoryReport, FeatureReport, PartReport
from sar.partition.inspect.part_inspection import (
    EdgeSources,
    Ids,
    PartContent,
    StoredFeature,
    What,
    inspect_part,
    one_thread,
)

_CHUNK = 2**18


class WorkerContent(NamedTuple):
    """The rows that one worker reads."""

    share: WorkerShare  # its nodes
    edges_from: Ids  # (R, W) in-edges of each type by the worker of their source
    rows_from: Ids  # (R, W) distinct nodes of each other worker that these come from


def inspect_directory(
    path: StrPath, *, values: bool = False, verify: bool = False, allow_outside: bool = False
) -> DirectoryReport:
    """Report the content of a partition directory, and whether its files fit together.

    Holds one part's `graph.dgl` at a time and, to check original IDs, one bit for each node and edge.

    Args:
        path: the directory's JSON file, or the directory.
        values: also look for NaN in features.
        verify: also compare every byte with the checksums of its part.
        allow_outside: whether the directory may lead to files outside of it.

    Returns:
        The report; the directory is sound if its `problems` are empty.

    Raises:
        PartitionError: the JSON file is missing or damaged, names a file outside, or its ranges of IDs contradict each
            other.
    """
    return inspect_parts(path, values=values, verify=verify, allow_outside=allow_outside)[0]


def inspect_parts(
    path: StrPath, *, values: bool = False, verify: bool = False, allow_outside: bool = False
) -> tuple[DirectoryReport, list[PartContent]]:
    """As `inspect_directory`, with the content of each part."""
    spec = read_partition_json(path, allow_outside=allow_outside)
    originals = _OriginalIds(spec)
    contents: list[PartContent] = []
    problems: list[str] = []
    for folder in [path.parent for files in spec.files for path in [*files.values()][:1]] if verify else []:
        problems += find_damage(folder)
        if not (folder / SUMS).exists():
            problems.append(
                f"{folder} has no {SUMS}: there are no checksums to verify its files by, as sar writes them."
            )
    with one_thread():
        for part in range(spec.num_parts):
            content = inspect_part(spec, part, values)
            originals.take(part, content)
            contents.append(content)
            problems += content.problems
    problems += originals.problems() + _edges_of_both_ends(spec, contents)
    canonical = ([":".join(etype) for etype in content.edge_types] for content in contents if content.edge_types)
    edge_names = next(canonical, spec.edge_types)
    features, differences = _features(spec, edge_names, contents)
    nodes, edges = (
        [dict(zip(names, owned_counts(ranges, p), strict=True)) for p in range(spec.num_parts)]
        for names, ranges in ((spec.node_types, spec.node_ranges), (edge_names, spec.edge_ranges))
    )
    written_by = "dgl.distributed.partition_graph"
    if spec.path.name == DISPATCH_JSON:
        written_by = "DGL's dispatch pipeline"
    elif originals.found_in("nodes") == "graph.dgl" or not all(":" in name for name in spec.edge_types):
        written_by += ", up to DGL 0.9"
    report = DirectoryReport(
        name=spec.name,
        method=spec.method,
        format=written_by,
        orig_node_ids=originals.found_in("nodes"),
        orig_edge_ids=originals.found_in("edges"),
        num_nodes={name: sum(of_part[name] for of_part in nodes) for name in spec.node_types},
        num_edges={name: sum(of_part[name] for of_part in edges) for name in edge_names},
        features=features,
        parts=[
            PartReport(
                of_nodes, of_edges, content.edges_from.sum(0).tolist(), content.read_from.tolist(), content.split
            )
            for of_nodes, of_edges, content in zip(nodes, edges, contents, strict=True)
        ],
        problems=problems + differences,
    )
    return report, contents


def by_worker(
    path: StrPath, report: DirectoryReport, workers: int, *, allow_outside: bool = False
) -> tuple[DirectoryReport, list[WorkerContent]]:
    """The report with workers in place of parts, as `sar.load_dgl_partition_data` deals them out, and the rows of each.

    Holds one part's `graph.dgl` at a time, and the IDs of the nodes that one worker reads. The report is one that found
    the directory sound; `path` and `allow_outside` are as in `inspect_directory`. `ConfigError` without workers.
    """
    if workers < 1:
        raise ConfigError(f"{workers} workers were asked for; expected at least 1.")
    spec = read_partition_json(path, allow_outside=allow_outside)
    graph_of = lru_cache(maxsize=1)(lambda part: PartFile(graph_path(spec, part)).read())  # one's workers come in turn
    parts, contents = [], []
    with one_thread():
        shares = WorkerShare.all(spec, workers)
        for worker, share in enumerate(shares):
            sources = EdgeSources([(one.start, one.end) for one in shares], worker, len(spec.edge_types))
            for graph in map(graph_of, share.parts):
                for chunk in pieces(len(graph.edges[EID])):
                    src, dst, ids = (graph.edges[key][chunk].long() for key in (SRC, DST, EID))
                    ends = graph.node_id[dst]
                    own = graph.is_inner[dst] & (ends >= share.start) & (ends < share.end)
                    sources.add(types_of(ids[own], spec.edge_ranges).long(), graph.node_id[src[own]])
            rows_from, read_from = sources.rows()
            rows = [share.rows(spec.node_ranges, kind) for kind in range(len(spec.node_types))]
            nodes = [sum(cut.stop - cut.start for cut in of_type.values()) for of_type in rows]
            split: dict[str, int] = {}
            for part in share.parts:
                for mask in (one for one in FeatureFiles(spec, part, "nodes").features() if one.name in SPLIT):
                    chosen = int(np.count_nonzero(mask.stored[rows[mask.type_id][part]]))
                    split[mask.name] = split.get(mask.name, 0) + chosen
            in_edges = dict(zip(report.num_edges, sources.edges.sum(axis=1).tolist(), strict=True))
            of_type = dict(zip(spec.node_types, nodes, strict=True))
            parts.append(PartReport(of_type, in_edges, sources.edges.sum(axis=0).tolist(), read_from.tolist(), split))
            contents.append(WorkerContent(share, sources.edges, rows_from))
    return replace(report, parts=parts), contents


def largest_value(path: StrPath, name: str) -> float:
    """The greatest value of a node feature over all parts, read in slices; `PartitionError` if no part has a value."""
    spec = read_partition_json(path)
    found = [
        float(rows.max())
        for part in range(spec.num_parts)
        for one in FeatureFiles(spec, part, "nodes").features()
        if one.name == name
        for _, rows in one.stored.slices()
        if rows.numel()
    ]
    if not found:
        raise PartitionError(f"{spec.path}: no part has values of {name!r}.")
    return max(found)


class _OriginalIds:
    """IDs in the input graph, in files of their own or in `graph.dgl`: a permutation of each type's numbers."""

    def __init__(self, spec: PartitionJson) -> None:
        self._spec = spec
        self._problems: list[str] = []
        self._files: dict[What, set[str]] = {"nodes": set(), "edges": set()}
        self._lacking: dict[What, list[int]] = {"nodes": [], "edges": []}
        self._checks: dict[What, list[PermutationCheck]] = {"nodes": [], "edges": []}
        for what, ranges in zip(self._checks, (spec.node_ranges, spec.edge_ranges), strict=True):
            self._checks[what] = [PermutationCheck(int(total)) for total in (ranges[..., 1] - ranges[..., 0]).sum(0)]

    def take(self, part: int, content: PartContent) -> None:
        """Note the original IDs of a part, and drop those in `content`."""
        spec = self._spec
        for files in (FeatureFiles(spec, part, "nodes"), FeatureFiles(spec, part, "edges", content.edge_types)):
            what: What = files.what
            in_graph = content.orig_ids.pop(what, None)
            try:
                stored = files.original_ids()
            except PartitionError as error:
                self._problems.append(str(error))
                self._files[what].add(ORIG_ID_FILES[what])
                continue
            if stored:
                self._files[what].add(ORIG_ID_FILES[what])
                for one in stored:
                    for _, ids in one.stored.slices():
                        self._checks[what][one.type_id].add(ids.long().numpy())
            elif in_graph is not None:
                self._files[what].add("graph.dgl")
                for check, ids in zip(self._checks[what], in_graph, strict=True):
                    check.add(ids.long().numpy())
            elif sum(files.counts):
                self._lacking[what].append(part)

    def found_in(self, what: What) -> str | None:
        """The files that the IDs are in."""
        return " and ".join(sorted(self._files[what])) or None

    def problems(self) -> list[str]:
        """Problems, after all parts."""
        problems = list(self._problems)
        names: dict[What, list[str]] = {"nodes": self._spec.node_types, "edges": self._spec.edge_types}
        for what in names:
            file = f"{self._spec.path.parent}/part*/{self.found_in(what)}"
            if self._files[what] and self._lacking[what]:
                problems.append(f"{file}: parts {self._lacking[what]} lack the original IDs that others have.")
            elif self._files[what]:
                problems += [
                    f"{file}: the original IDs of the {what} of type {name!r} are not 0 to {check.count - 1}, each "
                    f"once: {check.count - check.found} are missing, {check.repeated} are there again, "
                    f"{check.outside} are outside."
                    for name, check in zip(names[what], self._checks[what], strict=True)
                    if not check.is_permutation
                ]
        return problems


@dataclass
class PermutationCheck:
    """Whether IDs that come in pieces are 0 to `count` - 1, each once, in one bit for each."""

    count: int
    found: int = 0  # how many of these have been seen
    repeated: int = 0  # came again
    outside: int = 0  # are none of these

    @cached_property
    def _seen(self) -> NDArray[np.uint8]:
        return np.zeros(-(-self.count // 8), np.uint8)

    @property
    def is_permutation(self) -> bool:
        return self.found == self.count and not self.repeated and not self.outside

    def add(self, ids: Ids) -> None:  # (n,)
        for chunk in pieces(len(ids), _CHUNK):
            piece = np.sort(ids[chunk])
            inside = piece[(piece >= 0) & (piece < self.count)]
            self.outside += len(piece) - len(inside)
            new = inside[first_of_equals(inside)]
            new = new[(self._seen[new >> 3] >> (new & 7).astype(np.uint8)) & 1 == 0]
            self.repeated += len(inside) - len(new)
            self.found += len(new)
            np.add.at(self._seen, new >> 3, np.left_shift(1, new & 7).astype(np.uint8))  # of bits that are all 0


def _edges_of_both_ends(spec: PartitionJson, contents: Sequence[PartContent]) -> list[str]:
    """Compare the edges that a part stores towards others with those that these have as in-edges."""
    problems = []
    for p, sender in enumerate(contents):
        stores_them = bool(sender.edges_to.sum())  # only DGL's own writer does
        for q, reader in enumerate(contents if stores_them else []):
            there, here = int(sender.edges_to[q]), int(reader.edges_from[:, p].sum())
            same = there == here and sender.hashes_out[q] == reader.hashes_in[p]
            if p != q and reader.edge_types and not same:
                files = [spec.files[i]["part_graph"] for i in (p, q)]
                what = f"{there} edges" if there != here else f"other edges, {there} as well,"
                problems.append(f"{files[0]}: has {what} to nodes of part {q}, where {files[1]} has {here} of them.")
    return problems


def _features(
    spec: PartitionJson, edge_types: Sequence[str], contents: Sequence[PartContent]
) -> tuple[list[FeatureReport], list[str]]:
    """Each feature once, as its first part has it; and differences between parts in names, dtypes and widths."""
    found: dict[tuple[What, int, str], dict[int, StoredFeature]] = {}  # by part
    for p, content in enumerate(contents):
        for one in content.features:
            found.setdefault((one.what, one.type_id, one.name), {})[p] = one
    features: list[Any] = []
    problems = []
    for (what, type_id, name), by_part in found.items():
        ranges, names = (spec.node_ranges, spec.node_types) if what == "nodes" else (spec.edge_ranges, spec.edge_types)
        key, kind = f"{names[type_id]}/{name}", "node_feats" if what == "nodes" else "edge_feats"
        first, form = next((p, (one.dtype, one.shape)) for p, one in by_part.items())
        for p in range(spec.num_parts):
            file = spec.files[p].get(kind, spec.path)
            if p in by_part and (here := (by_part[p].dtype, by_part[p].shape)) != form:
                problems.append(f"{file}: {key!r} is {here}; expected {form}, as in part {first}.")
            if p not in by_part and owned_counts(ranges, p)[type_id]:
                problems.append(f"{file}: there is no {key!r}, which part {first} has.")
        counted = [one.nan_rows for one in by_part.values() if one.nan_rows is not None]
        nan_rows = sum(counted) if len(counted) == len(by_part) else None
        kind_name = names[type_id] if what == "nodes" else edge_types[type_id]
        features.append((what != "nodes", type_id, FeatureReport(what, kind_name, name, *form, nan_rows)))
    return [feature for *_, feature in sorted(features, key=lambda one: one[:2])], problems
