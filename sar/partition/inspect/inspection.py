"""Reads a whole partition directory: its content, every contradiction in it, and who reads how much of whom."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sar.common_tuples import EID, SPLIT, CanonicalEtype, StrPath
from sar.data.checksums import SUMS, find_damage
from sar.data.part_files import DST, SRC, FeatureFiles, PartFile, types_of
from sar.data.partition_json import (
    DISPATCH_JSON,
    ORIG_ID_FILES,
    PartitionJson,
    What,
    graph_path,
    owned_counts,
    read_partition_json,
)
from sar.data.regroup import WorkerShare
from sar.errors import ConfigError, PartitionError
from sar.id_slices import first_of_equals, pieces
from sar.partition.inspect.directory_report import DirectoryReport, FeatureReport, PartReport
from sar.partition.inspect.part_inspection import EdgeSources, PartContent, Reads, inspect_part, one_thread

_CHUNK = 2**18


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
) -> tuple[DirectoryReport, list[CanonicalEtype], list[Reads]]:
    """As `inspect_directory`, with the edge types, as far as they can be told, and what each part reads."""
    spec = read_partition_json(path, allow_outside=allow_outside)
    problems: list[str] = []
    for folder in [next(iter(files.values())).parent for files in spec.files if files] if verify else []:
        problems += find_damage(folder)
        if not (folder / SUMS).exists():
            problems.append(
                f"{folder} has no {SUMS}: there are no checksums to verify its files by, as sar writes them."
            )
    node_ids, edge_ids = _OriginalIds(spec, "nodes"), _OriginalIds(spec, "edges")
    contents: list[PartContent] = []
    with one_thread():
        for part in range(spec.num_parts):
            contents.append(content := inspect_part(spec, part, values))
            node_ids.take(content)
            edge_ids.take(content)
            problems += content.problems
    problems += node_ids.problems() + edge_ids.problems()
    edge_types = next((content.edge_types for content in contents if content.edge_types), [])
    edge_names = [":".join(etype) for etype in edge_types] or spec.edge_types
    features, differences = _features(spec, edge_names, contents)
    written_by = "dgl.distributed.partition_graph"
    if spec.path.name == DISPATCH_JSON:
        written_by = "DGL's dispatch pipeline"
    elif node_ids.files == {"graph.dgl"} or not all(":" in name for name in spec.edge_types):
        written_by += ", up to DGL 0.9"
    parts = [
        PartReport(
            nodes=dict(zip(spec.node_types, owned_counts(spec.node_ranges, part), strict=True)),
            in_edges=dict(zip(edge_names, owned_counts(spec.edge_ranges, part), strict=True)),
            edges_from=content.reads.edges.sum(0).tolist(),
            rows_from=content.reads.rows_of_all.tolist(),
            split=content.split,
        )
        for part, content in enumerate(contents)
    ]
    report = DirectoryReport(
        name=spec.name,
        method=spec.method,
        format=written_by,
        orig_node_ids=node_ids.found_in,
        orig_edge_ids=edge_ids.found_in,
        num_nodes={name: sum(part.nodes[name] for part in parts) for name in spec.node_types},
        num_edges={name: sum(part.in_edges[name] for part in parts) for name in edge_names},
        features=features,
        parts=parts,
        problems=problems + differences,
    )
    return report, edge_types, [content.reads for content in contents]


def by_worker(
    path: StrPath, report: DirectoryReport, workers: int, *, allow_outside: bool = False
) -> tuple[DirectoryReport, list[WorkerShare], list[Reads]]:
    """The report with workers in place of parts, as `sar.load_dgl_partition_data` deals them out; their shares and
    what they read.

    Holds one part's `graph.dgl` at a time, and the IDs of the nodes that one worker reads. The report is one that found
    the directory sound; `path` and `allow_outside` are as in `inspect_directory`. `ConfigError` without workers.
    """
    if workers < 1:
        raise ConfigError(f"{workers} workers were asked for; expected at least 1.")
    spec = read_partition_json(path, allow_outside=allow_outside)
    graph_of = lru_cache(maxsize=1)(lambda part: PartFile(graph_path(spec, part)).read())  # one's workers come in turn
    parts, reads = [], []
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
            reads.append(sources.reads())
            rows = [share.rows(spec.node_ranges, kind) for kind in range(len(spec.node_types))]
            nodes = [sum(cut.stop - cut.start for cut in of_type.values()) for of_type in rows]
            split: dict[str, int] = {}
            for part in share.parts:
                for mask in (one for one in FeatureFiles(spec, part, "nodes").features() if one.name in SPLIT):
                    chosen = int(np.count_nonzero(mask.stored[rows[mask.type_id][part]]))
                    split[mask.name] = split.get(mask.name, 0) + chosen
            in_edges = dict(zip(report.num_edges, reads[-1].edges.sum(1).tolist(), strict=True))
            of_type = dict(zip(spec.node_types, nodes, strict=True))
            edges_from, rows_from = reads[-1].edges.sum(0).tolist(), reads[-1].rows_of_all.tolist()
            parts.append(PartReport(of_type, in_edges, edges_from, rows_from, split))
    return replace(report, parts=parts), shares, reads


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


def _features(
    spec: PartitionJson, edge_names: Sequence[str], contents: Sequence[PartContent]
) -> tuple[list[FeatureReport], list[str]]:
    """Each feature once, as its first part has it; and differences between parts in names, dtypes and widths."""
    features, problems = [], []
    for what, type_id, name in dict.fromkeys(key for content in contents for key in content.features):
        found = [content.features.get((what, type_id, name)) for content in contents]
        number, first = next((p, one) for p, one in enumerate(found) if one is not None)
        names, ranges = spec.types(what)
        key, kind = f"{names[type_id]}/{name}", "node_feats" if what == "nodes" else "edge_feats"
        form = first.dtype, first.shape
        for p, one in enumerate(found):
            file = spec.files[p].get(kind, spec.path)
            if one is not None and (one.dtype, one.shape) != form:
                problems.append(f"{file}: {key!r} is {(one.dtype, one.shape)}; expected {form}, as in part {number}.")
            if one is None and owned_counts(ranges, p)[type_id]:
                problems.append(f"{file}: there is no {key!r}, which part {number} has.")
        counted = [one.nan_rows for one in found if one is not None and one.nan_rows is not None]
        nan_rows = sum(counted) if first.nan_rows is not None else None
        type_name = names[type_id] if what == "nodes" else edge_names[type_id]
        features.append((what != "nodes", type_id, replace(first, type=type_name, nan_rows=nan_rows)))
    return [feature for *_, feature in sorted(features, key=lambda one: one[:2])], problems


class _OriginalIds:
    """The IDs of nodes or of edges in the input graph, in files of their own or in `graph.dgl`."""

    def __init__(self, spec: PartitionJson, what: What) -> None:
        names, ranges = spec.types(what)
        self.what = what
        self.files: set[str] = set()
        self._folder = spec.path.parent
        self._lacking: list[int] = []  # parts
        totals = (ranges[..., 1] - ranges[..., 0]).sum(0).tolist()
        self._checks = {name: PermutationCheck(total) for name, total in zip(names, totals, strict=True)}

    @property
    def found_in(self) -> str | None:
        """The files that the IDs are in."""
        return " and ".join(sorted(self.files)) or None

    def take(self, content: PartContent) -> None:
        """Note the original IDs of a part, and drop those in `content`."""
        files, checks = content.files[self.what], [*self._checks.values()]
        in_graph = content.orig_ids.pop(self.what, None)
        try:
            stored = files.original_ids()
        except PartitionError as error:
            self.files.add(ORIG_ID_FILES[self.what])
            content.problems.append(str(error))
            return
        if stored:
            self.files.add(ORIG_ID_FILES[self.what])
            for one in stored:
                for _, ids in one.stored.slices():
                    checks[one.type_id].add(ids.long().numpy())
        elif in_graph is not None:
            self.files.add("graph.dgl")
            for check, ids in zip(checks, in_graph, strict=True):
                check.add(ids.long().numpy())
        elif sum(files.counts):
            self._lacking.append(files.part)

    def problems(self) -> list[str]:
        """Problems, after all parts: they are a permutation of each type's numbers, or there are none."""
        if not self.files:
            return []
        file = f"{self._folder}/part*/{self.found_in}"
        if self._lacking:
            return [f"{file}: parts {self._lacking} lack the original IDs that others have."]
        return [
            f"{file}: the original IDs of the {self.what} of type {name!r} are not 0 to {check.count - 1}, each once: "
            f"{check.count - check.found} are missing, {check.repeated} are there again, {check.outside} are outside."
            for name, check in self._checks.items()
            if not check.is_permutation
        ]


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

    def add(self, ids: NDArray[Any]) -> None:  # (n,) integers
        for chunk in pieces(len(ids), _CHUNK):
            piece = np.sort(ids[chunk])
            inside = piece[(piece >= 0) & (piece < self.count)]
            self.outside += len(piece) - len(inside)
            new = inside[first_of_equals(inside)]
            new = new[(self._seen[new >> 3] >> (new & 7).astype(np.uint8)) & 1 == 0]
            self.repeated += len(inside) - len(new)
            self.found += len(new)
            np.add.at(self._seen, new >> 3, np.left_shift(1, new & 7).astype(np.uint8))  # of bits that are all 0
