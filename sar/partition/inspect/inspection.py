"""Reads a whole partition directory, one part at a time: what is in it, every contradiction, and what workers read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sar.common_tuples import EID, SPLIT, StrPath
from sar.data.checksums import damage
from sar.data.part_files import DST, SRC, FeatureFiles, LocalGraph, PartFile, types_of
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
from sar.id_slices import pieces
from sar.partition.inspect.directory_report import DirectoryReport, FeatureReport, PartReport
from sar.partition.inspect.part_inspection import EdgeSources, PartContent, What, inspect_part, one_thread
from sar.partition.original_order import PermutationCheck


def inspect_directory(
    path: StrPath, *, values: bool = False, verify: bool = False, allow_outside: bool = False
) -> DirectoryReport:
    """Find what a partition directory holds, and whether its files fit together.

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
    """As `inspect_directory`, with what the files of each part hold."""
    spec = read_partition_json(path, allow_outside=allow_outside)
    originals = _Originals(spec)
    contents = []
    with one_thread():
        for part in range(spec.num_parts):
            content = inspect_part(spec, part, values=values)
            originals.take(part, content)
            contents.append(content)
    folders = [path.parent for files in spec.files for path in [*files.values()][:1]] if verify else []
    problems = [problem for folder in folders for problem in damage(folder)]
    problems += [problem for content in contents for problem in content.problems]
    problems += originals.problems() + _edges_of_both_ends(spec, contents)
    canonical = ([":".join(etype) for etype in content.edge_types] for content in contents if content.edge_types)
    edge_names = next(canonical, spec.edge_types)
    features, differences = _features(spec, edge_names, contents)
    nodes, edges = (
        [dict(zip(names, owned_counts(ranges, p), strict=True)) for p in range(spec.num_parts)]
        for names, ranges in ((spec.node_types, spec.node_ranges), (edge_names, spec.edge_ranges))
    )
    report = DirectoryReport(
        name=spec.name,
        method=spec.method,
        format=_format(spec, contents),
        orig_node_ids=originals.where("nodes"),
        orig_edge_ids=originals.where("edges"),
        num_nodes={name: sum(of_part[name] for of_part in nodes) for name in spec.node_types},
        num_edges={name: sum(of_part[name] for of_part in edges) for name in edge_names},
        features=features,
        parts=[
            PartReport(of_nodes, of_edges, content.edges_in.counts.tolist(), content.read_from.tolist(), content.split)
            for of_nodes, of_edges, content in zip(nodes, edges, contents, strict=True)
        ],
        problems=problems + differences,
    )
    return report, contents


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


def _format(spec: PartitionJson, contents: Sequence[PartContent]) -> str:
    if spec.path.name == DISPATCH_JSON:
        return "DGL's dispatch pipeline"
    if any(content.orig_ids for content in contents) or not all(":" in name for name in spec.edge_types):
        return "dgl.distributed.partition_graph, up to DGL 0.9"
    return "dgl.distributed.partition_graph"


class _Originals:
    """IDs in the input graph, in files of their own or in `graph.dgl`: a permutation of each type's numbers."""

    def __init__(self, spec: PartitionJson) -> None:
        self._spec = spec
        self._problems: list[str] = []
        self._found: dict[What, set[str]] = {"nodes": set(), "edges": set()}
        self._lacking: dict[What, list[int]] = {"nodes": [], "edges": []}
        node_totals, edge_totals = ((r[..., 1] - r[..., 0]).sum(0) for r in (spec.node_ranges, spec.edge_ranges))
        self._once: dict[What, list[PermutationCheck]] = {
            "nodes": [PermutationCheck(int(total)) for total in node_totals],
            "edges": [PermutationCheck(int(total)) for total in edge_totals],
        }

    def take(self, part: int, content: PartContent) -> None:
        """Note the original IDs of a part, and drop those in `content`."""
        spec = self._spec
        for files in (FeatureFiles(spec, part, "nodes"), FeatureFiles(spec, part, "edges", content.edge_types)):
            what: What = files.what
            try:
                stored = files.original_ids()
            except PartitionError as error:
                self._problems.append(str(error))
                self._found[what].add(ORIG_ID_FILES[what])
                continue
            in_graph = content.orig_ids.pop(what, None)
            ids_by_type: Iterable[tuple[int, Tensor]] = ()
            if stored:
                self._found[what].add(ORIG_ID_FILES[what])
                ids_by_type = ((one.type_id, ids) for one in stored for _, ids in one.stored.slices())
            elif in_graph is not None:
                self._found[what].add("graph.dgl")
                ids_by_type = enumerate(in_graph)
            elif sum(files.counts):
                self._lacking[what].append(part)
            for type_id, ids in ids_by_type:
                self._once[what][type_id].add(ids.to(torch.int64).numpy())

    def where(self, what: What) -> str | None:
        """The files that the IDs are in."""
        return " and ".join(sorted(self._found[what])) or None

    def problems(self) -> list[str]:
        """What is wrong with them, after all parts."""
        problems = list(self._problems)
        names: dict[What, list[str]] = {"nodes": self._spec.node_types, "edges": self._spec.edge_types}
        for what, files in self._found.items():
            if not files:
                continue
            file = f"{self._spec.path.parent}/part*/{self.where(what)}"
            if self._lacking[what]:
                problems.append(f"{file}: parts {self._lacking[what]} lack the original IDs that others have.")
                continue
            for name, once in zip(names[what], self._once[what], strict=True):
                if not once.is_permutation:
                    problems.append(
                        f"{file}: the original IDs of the {what} of type {name!r} are not 0 to {once.count - 1}, each "
                        f"once: {once.count - once.found} are missing, {once.repeated} are there again, "
                        f"{once.outside} are outside."
                    )
        return problems


def _edges_of_both_ends(spec: PartitionJson, contents: Sequence[PartContent]) -> list[str]:
    """Compare the edges that a part stores towards others with those that these have as in-edges."""
    problems = []
    for p, sender in enumerate(contents):
        stores_them = bool(sender.edges_out.counts.sum())  # only DGL's own writer does
        for q, reader in enumerate(contents if stores_them else []):
            there, here = (int(x.counts[i]) for x, i in ((sender.edges_out, q), (reader.edges_in, p)))
            same = sender.edges_out.fingerprints[q] == reader.edges_in.fingerprints[p]
            if p != q and reader.edge_types and (there != here or not same):
                files = [spec.files[i]["part_graph"] for i in (p, q)]
                what = f"{there} edges" if there != here else f"other edges, {there} as well,"
                problems.append(f"{files[0]}: has {what} to nodes of part {q}, where {files[1]} has {here} of them.")
    return problems


def _features(
    spec: PartitionJson, edge_types: Sequence[str], contents: Sequence[PartContent]
) -> tuple[list[FeatureReport], list[str]]:
    """Each feature once, with what its first part says of it; and where parts differ in names, dtypes and widths."""
    found: dict[tuple[What, int, str], dict[int, Any]] = {}  # `StoredFeature`s by part
    for p, content in enumerate(contents):
        for one in content.features:
            found.setdefault((one.what, one.type_id, one.name), {})[p] = one
    features, problems = [], []
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


class WorkerContent(NamedTuple):
    """What one worker reads."""

    share: WorkerShare  # its nodes
    edges_from: NDArray[np.int64]  # (R, W) in-edges of each type by the worker of their source
    rows_from: NDArray[np.int64]  # (R, W) distinct nodes of each other worker that these come from


def by_worker(
    path: StrPath, report: DirectoryReport, workers: int, *, allow_outside: bool = False
) -> tuple[DirectoryReport, list[WorkerContent]]:
    """The report with workers in place of parts, as `sar.load_dgl_partition_data` deals these out, and what each reads.

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
            for part in share.parts:
                _add_sources(sources, spec, share, graph_of(part))
            rows_from, read_from = sources.rows()
            rows = [share.rows(spec.node_ranges, kind) for kind in range(len(spec.node_types))]
            nodes = [sum(cut.stop - cut.start for cut in of_type.values()) for of_type in rows]
            parts.append(
                PartReport(
                    nodes=dict(zip(spec.node_types, nodes, strict=True)),
                    in_edges=dict(zip(report.num_edges, sources.edges.sum(axis=1).tolist(), strict=True)),
                    edges_from=sources.edges.sum(axis=0).tolist(),
                    rows_from=read_from.tolist(),
                    split=_split(spec, share.parts, rows),
                )
            )
            contents.append(WorkerContent(share, sources.edges, rows_from))
    return replace(report, parts=parts), contents


def _add_sources(sources: EdgeSources, spec: PartitionJson, share: WorkerShare, graph: LocalGraph) -> None:
    """Count the edges of a part into a worker's nodes."""
    for chunk in pieces(len(graph.edges[EID])):
        src, dst, ids = (graph.edges[key][chunk].long() for key in (SRC, DST, EID))
        ends = graph.node_id[dst]
        mine = graph.is_inner[dst] & (ends >= share.start) & (ends < share.end)
        sources.add(types_of(ids[mine], spec.edge_ranges).long(), graph.node_id[src[mine]])


def _split(spec: PartitionJson, parts: Sequence[int], rows_of: Sequence[Mapping[int, slice]]) -> dict[str, int]:
    """How many of a worker's rows, by type and part, each mask chooses."""
    chosen: dict[str, int] = {}
    for part in parts:
        files = FeatureFiles(spec, part, "nodes")
        for mask in (one for one in files.features() if one.name in SPLIT):
            count = np.count_nonzero(mask.stored[rows_of[mask.type_id][part]])
            chosen[mask.name] = chosen.get(mask.name, 0) + int(count)
    return chosen
