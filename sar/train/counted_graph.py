"""Counts the nodes, edges and halo rows of workers in a partition directory, and creates graphs of these sizes.

Tensors are on torch's device "meta", without values. Messages are counted but not sent: only one worker of the group
exists.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sar.adapters.dgl.graphs import DGL
from sar.comm.group import Group
from sar.comm.tiles import HaloPlan
from sar.common_tuples import EID, CanonicalEtype, StrPath
from sar.core.graph.graph import GraphShardManager, make_graph
from sar.core.relation import NodeSet, Relation, Structure
from sar.data.partition_json import read_partition_json
from sar.errors import ConfigError
from sar.kernels import EdgeBlock, index_dtype
from sar.partition.inspect.inspection import inspect_directory, largest_value
from sar.partition.inspect.report import DirectoryReport

META = torch.device("meta")
INPUTS, LABELS, TRAIN_MASK = ("feat", "x"), ("label", "y"), "train_mask"  # DGL's names, then those of PyTorch Geometric
_ID_BYTES = 8
_TYPE_BYTES = 4


@dataclass(frozen=True)
class GraphInfo:
    """Properties of the graph for a function that creates a model for `sar plan`."""

    ntypes: list[str]
    canonical_etypes: list[CanonicalEtype]
    num_nodes: dict[str, int]  # by type, over all workers
    in_widths: dict[str, int]  # width of the input features, by node type with features
    num_classes: int  # width of the output


@dataclass(frozen=True)
class RelationCounts:
    """Counts of the edges of one type."""

    etype: CanonicalEtype
    edges: list[list[int]]  # [r][p] is the number of edges from worker p into worker r
    halo: list[list[int]]  # [r][p] is the number of distinct sources of these edges on worker p; 0 if p is r
    features: dict[str, tuple[tuple[int, ...], torch.dtype]]  # trailing shape and dtype of each edge feature


@dataclass(frozen=True)
class GraphCounts:
    """Counts of a partitioned graph."""

    info: GraphInfo
    nodes: list[dict[str, int]]  # of each type, by worker
    train_nodes: list[int]  # nodes in `train_mask` by worker; all nodes without a mask
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


def count_graph(path: StrPath, *, in_width: int | None = None, num_classes: int | None = None) -> GraphCounts:
    """Count the nodes, edges and halo rows of a partition directory, given as such or by its JSON file.

    Each part has one worker. Its counts are in the JSON file (`PartitionJson.counts`); otherwise all graphs are read.

    Args:
        path: the directory.
        in_width: width of the input. None: that of the node feature `feat`, else `x`.
        num_classes: number of classes. None: one more than the greatest `label`, else `y`.

    Raises:
        ConfigError: the directory is not sound, or lacks a feature that determines a missing argument.
        PartitionError: the JSON file is missing or damaged.
    """
    spec = read_partition_json(path)
    report = inspect_directory(path, graphs=spec.counts is None)
    if report.problems:
        raise ConfigError(f"the directory is not sound, see `sar inspect`. {report.problems[0]}")
    assert report.counts is not None
    if in_width is None:
        widths: dict[str, int] = {}
        for name in reversed(INPUTS):  # of a type with both, the first decides
            inputs = (one for one in report.features if one.of == "nodes" and one.name == name)
            widths |= {one.type: math.prod(one.shape) for one in inputs if len(one.shape) == 1}
        if not widths:
            raise ConfigError(
                "there is no node feature 'feat' of one dimension; pass the width of the input: --features F."
            )
    else:
        widths = dict.fromkeys(report.num_nodes, in_width)
    if num_classes is None:
        labels = {one.name for one in report.features if one.of == "nodes" and one.shape in ((), (1,))}
        label = next((name for name in LABELS if name in labels), None)
        if label is None:
            raise ConfigError("there is no node feature 'label'; pass the number of classes: --classes C.")
        num_classes = int(largest_value(path, label)) + 1
    return GraphCounts(
        info=GraphInfo(spec.node_types, spec.edge_types, report.num_nodes, widths, num_classes),
        nodes=[part.nodes for part in report.parts],
        train_nodes=[part.split.get(TRAIN_MASK, part.num_nodes) for part in report.parts],
        relations=[
            RelationCounts(
                etype,
                edges.tolist(),
                halo.tolist(),
                features=_features(report, "edges", ":".join(etype)) | {EID: ((), torch.int64)},
            )
            for etype, edges, halo in zip(spec.edge_types, *report.counts, strict=True)
        ],
        node_bytes={
            ntype: _row_bytes(report, "nodes", ntype, report.orig_node_ids) + _TYPE_BYTES for ntype in spec.node_types
        },
        edge_bytes=[_row_bytes(report, "edges", name, report.orig_edge_ids) for name in spec.edge_type_names],
    )


def _features(report: DirectoryReport, of: str, kind: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Trailing shape and dtype of the features of a type of nodes or edges."""
    features = [one for one in report.features if (one.of, one.type) == (of, kind)]
    return {one.name: (one.shape, getattr(torch, one.dtype)) for one in features}


def _row_bytes(report: DirectoryReport, of: str, kind: str, original_ids: str | None) -> int:
    """Bytes of a node's or an edge's features and IDs; `original_ids` names their file, if any."""
    features = sum(math.prod(shape) * dtype.itemsize for shape, dtype in _features(report, of, kind).values())
    return features + (2 if original_ids else 1) * _ID_BYTES


# -- the graph of one worker


def counted_graph(counts: GraphCounts, worker: int, group: Group) -> tuple[GraphShardManager, Structure]:
    """Create the graph of one worker, with its edge features and IDs; its group represents all workers."""
    ids = {ntype: _ids(count, torch.int64) for ntype, count in counts.nodes[worker].items()}
    nodes = NodeSet(ids, ids, counts.info.num_nodes)
    ends = torch.tensor([sum(of_worker.values()) for of_worker in counts.nodes], device="cpu").cumsum(0).tolist()
    node_ranges = list(zip([0, *ends[:-1]], ends, strict=True))
    relations = [_relation(counts, relation, worker, group.local_peers) for relation in counts.relations]
    structure = Structure(group, META, node_ranges, nodes, nodes, relations, "planned", DGL)
    features = [
        {
            name: torch.empty(sum(relation.edges[worker]), *shape, dtype=dtype, device=META)
            for name, (shape, dtype) in relation.features.items()
        }
        for relation in counts.relations
    ]
    return make_graph(structure, features, None), structure


def _relation(counts: GraphCounts, relation: RelationCounts, worker: int, peers: Sequence[int]) -> Relation:
    source, _, destination = relation.etype
    nodes = counts.nodes[worker]
    blocks: list[EdgeBlock] = []
    offset = 0
    for p, edges in enumerate(relation.edges[worker]):
        num_src = nodes[source] if p == worker else relation.halo[worker][p]
        blocks.append(CountedBlock(edges, num_src, nodes[destination], offset))
        offset += edges
    send_rows = [_ids(reader[worker], torch.int32) for reader in relation.halo]
    mean_rows = sum(of_worker[source] for of_worker in counts.nodes) // counts.num_workers
    halo = torch.tensor(relation.halo, device="cpu").T
    # Only the blocks of workers in this process are read.
    local_rows = [torch.cat(send_rows)] * len(peers) if len(peers) > 1 else ()
    plan = HaloPlan(worker, send_rows, halo, mean_rows, local_rows)
    return Relation(
        etype=relation.etype,
        blocks=blocks,
        halos=[_ids(rows, torch.int32) for rows in relation.halo[worker]],
        plan=plan,
        num_src=nodes[source],
        num_dst=nodes[destination],
        num_edges_global=sum(map(sum, relation.edges)),
        in_degrees=_ids(nodes[destination], torch.int64),
        out_degrees=_ids(nodes[source], torch.int64),
        message_order=_ids(offset, torch.int64),
    )


class CountedBlock(EdgeBlock):
    """A number of edges whose ends are assumed to be random."""

    def __init__(
        self, num_edges: int, num_src: int, num_dst: int, edge_offset: int = 0, edge_ids: bool = False
    ) -> None:
        # The expected number of distinct destinations.
        rows = round(num_dst * -math.expm1(-num_edges / num_dst)) if num_dst else 0
        dtype = index_dtype(edge_offset + num_edges)
        super().__init__(
            rows=_ids(rows, torch.int32),
            indptr=_ids(rows + 1, index_dtype(num_edges)),
            cols=_ids(num_edges, torch.int32),
            num_src=num_src,
            num_dst=num_dst,
            edge_ids=(lambda: _ids(num_edges, dtype)) if edge_ids else None,
            edge_offset=0 if edge_ids else edge_offset,
        )

    def select_sources(self, begin: int, end: int) -> EdgeBlock:
        """The block of edges with sources from begin to end, in proportion to all sources."""
        if begin == 0 and end == self.num_src:
            return self
        edges = self.num_edges * end // self.num_src - self.num_edges * begin // self.num_src
        return CountedBlock(edges, end - begin, self.num_dst, self.edge_offset, edge_ids=True)


def _ids(count: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype, device=META)
