"""Counts the nodes, edges and halo rows that each worker of a partition directory has: all that a plan knows of it."""

from dataclasses import dataclass
from math import prod

import torch

from sar.common_tuples import EID, CanonicalEtype, StrPath
from sar.data.partition_json import read_partition_json
from sar.errors import ConfigError
from sar.partition.inspect.by_worker import count_by_worker
from sar.partition.inspect.inspection import inspect_directory, largest_value
from sar.partition.inspect.report import DirectoryReport

INPUTS, LABELS, TRAIN_MASK = ("feat", "x"), ("label", "y"), "train_mask"  # DGL's names, then those of PyTorch Geometric
_ID_BYTES = 8
_TYPE_BYTES = 4


@dataclass(frozen=True)
class GraphInfo:
    """Facts on the graph for a function that makes a model for `sar plan`."""

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
    halo: list[list[int]]  # [r][p] is the number of distinct nodes of worker p that these come from; 0 if p is r
    features: dict[str, tuple[tuple[int, ...], torch.dtype]]  # trailing shape and dtype of each edge feature


@dataclass(frozen=True)
class GraphCounts:
    """A partitioned graph in numbers."""

    info: GraphInfo
    nodes: list[dict[str, int]]  # of each type, by worker
    train_nodes: list[int]  # that `train_mask` chooses on each worker; all nodes if there is no mask
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

    Args:
        path: the directory.
        workers: None: one for each part.
        in_width: of the input; None: that of the node feature `feat`, else `x`.
        num_classes: None: one more than the greatest `label`, else `y`.

    Raises:
        ConfigError: the directory is not sound, or lacks a feature that would say what is left out.
        PartitionError: the JSON file is missing or damaged.
    """
    report = inspect_directory(path)
    if report.problems:
        raise ConfigError(f"the directory is not sound, see `sar inspect`. {report.problems[0]}")
    counts = count_by_worker(path, workers)
    etypes = read_partition_json(path).edge_types
    if in_width is None:
        widths: dict[str, int] = {}
        for name in reversed(INPUTS):  # of a type with both, the first decides
            features = (one for one in report.features if one.of == "nodes" and one.name == name)
            widths |= {one.type: prod(one.shape) for one in features if len(one.shape) == 1}
        if not widths:
            raise ConfigError(
                "there is no node feature 'feat' of one dimension; say how wide the input is: --features F."
            )
    else:
        widths = dict.fromkeys(report.num_nodes, in_width)
    if num_classes is None:
        labels = {one.name for one in report.features if one.of == "nodes" and one.shape in ((), (1,))}
        label = next((name for name in LABELS if name in labels), None)
        if label is None:
            raise ConfigError("there is no node feature 'label'; say how many classes there are: --classes C.")
        num_classes = int(largest_value(path, label)) + 1
    return GraphCounts(
        info=GraphInfo(list(report.num_nodes), etypes, report.num_nodes, widths, num_classes),
        nodes=[worker.nodes for worker in counts],
        train_nodes=[worker.split.get(TRAIN_MASK, sum(worker.nodes.values())) for worker in counts],
        relations=[
            RelationCounts(
                etype,
                edges=[worker.edges[number].tolist() for worker in counts],
                halo=[worker.rows[number].tolist() for worker in counts],
                features=_features(report, "edges", ":".join(etype)) | {EID: ((), torch.int64)},
            )
            for number, etype in enumerate(etypes)
        ],
        node_bytes={
            ntype: _row_bytes(report, "nodes", ntype, report.orig_node_ids) + _TYPE_BYTES for ntype in report.num_nodes
        },
        edge_bytes=[_row_bytes(report, "edges", ":".join(etype), report.orig_edge_ids) for etype in etypes],
    )


def _features(report: DirectoryReport, of: str, kind: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Trailing shape and dtype of the features of a type of nodes or edges."""
    features = [one for one in report.features if (one.of, one.type) == (of, kind)]
    return {one.name: (one.shape, getattr(torch, one.dtype)) for one in features}


def _row_bytes(report: DirectoryReport, of: str, kind: str, original_ids: str | None) -> int:
    """Bytes of a node's or an edge's features and IDs; `original_ids` names their file, if any."""
    features = sum(prod(shape) * dtype.itemsize for shape, dtype in _features(report, of, kind).values())
    return features + (2 if original_ids else 1) * _ID_BYTES
