"""What each worker of a job holds and reads, whatever the number of workers that share a directory's parts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from os import PathLike
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sar.common_tuples import EID
from sar.errors import ConfigError
from sar.id_slices import pieces
from sar.partition.inspect.directory_report import DirectoryReport, PartReport
from sar.partition.inspect.edge_sources import EdgeSources
from sar.partition.inspect.part_inspection import MASKS, one_thread
from sar.storage.edge_type_names import types_of
from sar.storage.feature_files import FeatureFiles
from sar.storage.local_graph import DST, SRC, LocalGraph, PartFile
from sar.storage.partition_json import DISPATCH_JSON, PartitionJson, graph_path, read_partition_json
from sar.storage.worker_share import WorkerShare


class WorkerContent(NamedTuple):
    """What one worker reads.

    share: its nodes.
    edges_from, rows_from: (R, W) in-edges of each type by the worker of their source, and distinct nodes of each other
        worker that these come from.
    """

    share: WorkerShare
    edges_from: NDArray[np.int64]
    rows_from: NDArray[np.int64]


def by_worker(
    path: str | PathLike[str], report: DirectoryReport, workers: int, *, allow_outside: bool = False
) -> tuple[DirectoryReport, list[WorkerContent]]:
    """The report with workers in place of parts, as `sar.load_dgl_partition_data` deals these out, and what each reads.

    Holds one part's `graph.dgl` at a time, and the IDs of the nodes that one worker reads.

    Args:
        path: the directory's JSON file, or the directory.
        report: on it, which found it sound.
        workers: W.
        allow_outside: as in `inspect_directory`.

    Raises:
        ConfigError: the number of workers is no positive one.
    """
    if workers < 1:
        raise ConfigError(f"{workers} workers were asked for; expected at least 1.")
    spec = read_partition_json(path, allow_outside=allow_outside)
    graph_of = lru_cache(maxsize=1)(lambda part: PartFile(graph_path(spec, part)).read())  # one's workers come in turn
    parts, contents = [], []
    with one_thread():
        shares = WorkerShare.all(spec, workers)
        for worker, share in enumerate(shares):
            sources = _sources(spec, shares, worker, graph_of)
            rows_from, read_from = sources.rows()
            rows = [share.rows(spec, kind) for kind in range(len(spec.node_types))]
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


def _sources(
    spec: PartitionJson, shares: Sequence[WorkerShare], worker: int, graph_of: Callable[[int], LocalGraph]
) -> EdgeSources:
    """Of the edges into a worker's nodes."""
    share = shares[worker]
    sources = EdgeSources([(one.start, one.end) for one in shares], worker, len(spec.edge_types))
    for part in share.parts:
        graph = graph_of(part)
        for chunk in pieces(len(graph.edges[EID])):
            src, dst, ids = (graph.edges[key][chunk].long() for key in (SRC, DST, EID))
            ends = graph.node_id[dst]
            mine = graph.is_inner[dst] & (ends >= share.start) & (ends < share.end)
            sources.add(types_of(ids[mine], spec.edge_ranges).long(), graph.node_id[src[mine]])
    return sources


def _split(spec: PartitionJson, parts: Sequence[int], rows_of: Sequence[Mapping[int, slice]]) -> dict[str, int]:
    """How many of a worker's rows, by type and part, each mask chooses."""
    chosen: dict[str, int] = {}
    for part in parts:
        files = FeatureFiles.of_nodes(spec, part, from_dispatch=spec.path.name == DISPATCH_JSON)
        for mask in (one for one in files.features() if one.name in MASKS):
            cut = rows_of[mask.type_id][part]
            count = sum(
                int((rows[max(cut.start - first, 0) : max(cut.stop - first, 0)] != 0).sum())
                for first, rows in mask.stored.slices()
            )
            chosen[mask.name] = chosen.get(mask.name, 0) + count
    return chosen
