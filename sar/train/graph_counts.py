"""How many nodes, edges and halo rows each worker of a partitioned graph has: all that a plan knows of it.

Counted in a partition directory, or from an assignment before a graph is written.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import numpy as np
import torch

from sar.common_tuples import EID, CanonicalEtype, StrPath
from sar.data.arrays import Array
from sar.errors import ConfigError
from sar.partition.assign.task import count_crossing
from sar.partition.graph_source import CHUNK_ROWS, GraphSource
from sar.partition.inspect.directory_report import DirectoryReport
from sar.partition.inspect.inspection import WorkerContent, by_worker, inspect_parts, largest_value
from sar.partition.inspect.part_inspection import PartContent
from sar.partition.write.write import Written, written_report

INPUTS, LABELS, TRAIN_MASK = ("feat", "x"), ("label", "y"), "train_mask"  # DGL's names, then those of PyTorch Geometric
_ID_BYTES = 8
_TYPE_BYTES = 4


@dataclass(frozen=True)
class GraphInfo:
    """What a function that makes a model for `sar plan` is told of the graph."""

    ntypes: list[str]
    canonical_etypes: list[CanonicalEtype]
    num_nodes: dict[str, int]  # of each type on all workers
    in_widths: dict[str, int]  # of the input features of each node type that has any
    num_classes: int  # width of the output


@dataclass(frozen=True)
class RelationCounts:
    """The edges of one type, counted."""

    etype: CanonicalEtype
    edges: list[list[int]]  # [r][p] is the number of edges from worker p into worker r
    halo: list[list[int]]  # [r][p] is the number of distinct nodes of worker p that these come from; 0 where p is r
    features: dict[str, tuple[tuple[int, ...], torch.dtype]]  # trailing shape and dtype of each edge feature


@dataclass(frozen=True)
class GraphCounts:
    """A partitioned graph in numbers."""

    info: GraphInfo
    nodes: list[dict[str, int]]  # of each type, by worker
    train_nodes: list[int]  # that `train_mask` chooses on each worker; all nodes where there is no mask
    relations: list[RelationCounts]
    node_bytes: dict[str, int]  # bytes of a node's features and IDs, by type
    edge_bytes: list[int]  # bytes of an edge's features and IDs, by edge type in the order of `relations`

    @property
    def num_workers(self) -> int:
        return len(self.nodes)

    def data_bytes(self, worker: int) -> int:
        """Bytes of the features and IDs of a worker."""
        of_nodes = sum(count * self.node_bytes[ntype] for ntype, count in self.nodes[worker].items())
        counted = zip(self.relations, self.edge_bytes, strict=True)
        return of_nodes + sum(sum(relation.edges[worker]) * size for relation, size in counted)


def count_graph(
    path: StrPath, *, workers: int | None = None, in_width: int | None = None, num_classes: int | None = None
) -> GraphCounts:
    """Count the nodes, edges and halo rows of a partition directory, given as such or by its JSON file.

    By default there is a worker for each part, `in_width` is that of the node feature `feat`, else `x`, and
    `num_classes` is one more than the greatest `label`, else `y`. Raises `ConfigError` if the directory is not sound or
    lacks a feature that would say what is left out, and `PartitionError` if the JSON file is missing or damaged.
    """
    report, contents = inspect_parts(path)
    if report.problems:
        raise ConfigError(f"the directory is not sound, see `sar inspect`. {report.problems[0]}")
    readers: Sequence[PartContent | WorkerContent] = contents
    if workers is not None and workers != len(report.parts):
        report, readers = by_worker(path, report, workers)
    crossing = {
        etype: ([of.edges_from[number].tolist() for of in readers], [of.rows_from[number].tolist() for of in readers])
        for number, etype in enumerate(contents[0].edge_types)
    }
    return counts_of(report, crossing, in_width, num_classes, partial(largest_value, path))


def counts_of(
    report: DirectoryReport,
    crossing: Mapping[CanonicalEtype, tuple[list[list[int]], list[list[int]]]],
    in_width: int | None,
    num_classes: int | None,
    largest_value_of: Callable[[str], float],
) -> GraphCounts:
    """What a report on parts, or on workers in place of them, says in numbers.

    `crossing` has `RelationCounts.edges` and `halo` of each edge type; `largest_value_of` gives the greatest value
    of a node feature, here of the labels if `num_classes` is None. The rest is as in `count_graph`.
    """
    info = GraphInfo(
        ntypes=list(report.num_nodes),
        canonical_etypes=list(crossing),
        num_nodes=report.num_nodes,
        in_widths=_in_widths(report, in_width),
        num_classes=_classes(report, largest_value_of) if num_classes is None else num_classes,
    )
    return GraphCounts(
        info=info,
        nodes=[part.nodes for part in report.parts],
        train_nodes=[part.split.get(TRAIN_MASK, part.num_nodes) for part in report.parts],
        relations=[
            RelationCounts(etype, *counted, _forms(report, "edges", ":".join(etype)) | {EID: ((), torch.int64)})
            for etype, counted in crossing.items()
        ],
        node_bytes={
            ntype: _row_bytes(report, "nodes", ntype, report.orig_node_ids) + _TYPE_BYTES for ntype in report.num_nodes
        },
        edge_bytes=[_row_bytes(report, "edges", ":".join(etype), report.orig_edge_ids) for etype in crossing],
    )


def count_source(
    graph: GraphSource, part_of: Array, num_parts: int, *, in_width: int | None = None, num_classes: int | None = None
) -> GraphCounts:
    """What `count_graph` finds in a directory to which an assignment of a graph's nodes is written.

    One pass over the edges; P / 8 bytes of memory a node. `part_of` is the part of every node, (N,), 0 to P - 1. Raises
    `ConfigError` as `count_graph`, and where an edge ends outside the graph.
    """
    crossing = {}
    for etype in graph.edges:
        of_type = replace(graph, edges={etype: graph.edges[etype]})  # nodes keep their numbers
        counted = count_crossing(of_type.chunks(), part_of, num_parts)
        crossing[etype] = counted.edges.T, counted.halo.T
    by_type = graph.by_type(part_of).values()
    nodes = np.stack([np.bincount(of_type, minlength=num_parts) for of_type in by_type], axis=1)
    edges = np.stack([edges.sum(axis=1) for edges, _ in crossing.values()], axis=1)
    # A node that is read by several types counts in each, unlike in a directory; no plan asks for the sum.
    sums = [np.sum(matrices, axis=0) for matrices in zip(*crossing.values(), strict=True)]
    report = written_report(graph, part_of, Written(nodes, edges, *sums), graph.name, "")
    of_types = {etype: (edges.tolist(), halo.tolist()) for etype, (edges, halo) in crossing.items()}
    return counts_of(report, of_types, in_width, num_classes, partial(_largest_value, graph))


def even_share(counts: GraphCounts, num_parts: int, *, shown: int = 1) -> GraphCounts:
    """`shown` of P parts that have as much of everything, rounded down, and read nothing from each other.

    `counts` are those of the graph as one part.
    """
    diagonal = np.eye(shown, dtype=np.int64)
    relations = [
        replace(one, edges=(one.edges[0][0] // num_parts * diagonal).tolist(), halo=(0 * diagonal).tolist())
        for one in counts.relations
    ]
    nodes = [{ntype: count // num_parts for ntype, count in counts.nodes[0].items()}] * shown
    return replace(counts, nodes=nodes, train_nodes=[counts.train_nodes[0] // num_parts] * shown, relations=relations)


def _forms(report: DirectoryReport, of: str, kind: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Trailing shape and dtype of the features of a type of nodes or edges."""
    features = [one for one in report.features if (one.of, one.type) == (of, kind)]
    return {one.name: (one.shape, getattr(torch, one.dtype)) for one in features}


def _row_bytes(report: DirectoryReport, of: str, kind: str, original_ids: str | None) -> int:
    """Bytes of a node's or an edge's features and IDs; `original_ids` says where these are, if anywhere."""
    features = sum(prod(shape) * dtype.itemsize for shape, dtype in _forms(report, of, kind).values())
    return features + (2 if original_ids else 1) * _ID_BYTES


def _in_widths(report: DirectoryReport, in_width: int | None) -> dict[str, int]:
    """Width of the input features, by node type."""
    if in_width is not None:
        return dict.fromkeys(report.num_nodes, in_width)
    inputs = [one for one in report.features if one.of == "nodes" and one.name in INPUTS and len(one.shape) == 1]
    inputs.sort(key=lambda one: INPUTS.index(one.name), reverse=True)
    found = {one.type: one.shape[0] for one in inputs}  # of a type with both `feat`, which comes last
    if not found:
        raise ConfigError("there is no node feature 'feat' of one dimension; say how wide the input is: --features F.")
    return found


def _classes(report: DirectoryReport, largest_value_of: Callable[[str], float]) -> int:
    names = {one.name for one in report.features if one.of == "nodes" and one.shape in ((), (1,))}
    for name in LABELS:
        if name in names:
            return int(largest_value_of(name)) + 1
    raise ConfigError("there is no node feature 'label'; say how many classes there are: --classes C.")


def _largest_value(graph: GraphSource, name: str) -> float:
    columns = [fields[name] for fields in graph.node_data.values() if name in fields]
    starts = [(column, start) for column in columns for start in range(0, column.shape[0], CHUNK_ROWS)]
    return max((float(np.max(column[start : start + CHUNK_ROWS])) for column, start in starts), default=-1.0)
