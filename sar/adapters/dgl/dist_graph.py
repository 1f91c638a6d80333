"""`convert_dist_graph`: converts the graph of DistDGL. The trainers of a machine share its partition.

DGL's server on each machine holds one partition in shared memory: the *served* partition. sar's partition of a worker
is a consecutive range of its nodes.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sar.adapters.dgl.graphs import construct_full_graph
from sar.adapters.dgl.shim import require_dgl
from sar.comm import session
from sar.comm.group import Group
from sar.common_tuples import EID, NID, NTYPE, PartitionData, ShardEdgesAndFeatures
from sar.core.graph.graph import GraphShardManager
from sar.data.load import ShardFields
from sar.data.part_files import DST, INNER_NODE, SRC, LocalGraph, types_of
from sar.data.partition_json import IdRanges
from sar.data.regroup import VisibleEdges, equal_runs, node_costs, order_edges
from sar.errors import GraphError, PartitionError
from sar.tensors.id_arrays import is_permutation
from sar.tensors.views import as_numpy


def convert_dist_graph(dist_graph: Any) -> GraphShardManager:
    """Create the distributed graph of a `dgl.distributed.DistGraph`. All trainers must call this together.

    With one trainer per machine, a worker owns the nodes of the machine's partition. Several trainers split these nodes
    by rank, into consecutive IDs with about the same number of in-edges. `node_ranges` describes the workers and
    `partition_book` the machines.

    Node features are in `ndata` and edge features in `edata`, by their own names; `_ID` holds the partitioning's IDs
    over all types. Node features are not copied: they share memory with the `DistTensor`, so later writes to it are
    visible here. Edge features are copied.

    Args:
        dist_graph: a graph with running servers, or a standalone one. Ranks of `torch.distributed` must be in order of
            partitions, as DGL's launcher assigns them: first the trainers of partition 0, then those of partition 1.

    Returns:
        The graph, on the CPU.

    Raises:
        GraphError: the argument is not a `DistGraph`.
        PartitionError: the ranks are in a different order, a partition has no trainer, or the memory shared with the
            server does not hold the partition that the partition book names.
        CommunicationError: another worker raised, or has a different graph.
    """
    with session.current_group().guard() as group:
        group.agree("convert_dist_graph")
        if not isinstance(dist_graph, require_dgl().distributed.DistGraph):
            raise GraphError(
                f"convert_dist_graph was given a {type(dist_graph).__name__}; expected a DistGraph of DGL."
            )
        served = _ServedPartition.of(dist_graph)
        node_ranges = _divide_nodes(served, group)
        (start, end), node_id = node_ranges[group.rank], served.graph.node_id
        graph = replace(served.graph, is_inner=(node_id >= start) & (node_id < end))
        data = PartitionData(
            node_features=_node_features(dist_graph, served, graph),
            all_shard_edges=_shards(dist_graph, served, order_edges(graph, node_ranges, group.rank)),
            node_ranges=node_ranges,
            node_type_names=served.book.ntypes,
            edge_type_names=served.book.canonical_etypes,
            partition_book=served.book,
        )
    distributed = construct_full_graph(data)
    types = data.node_features[NTYPE]
    for type_id, ntype in enumerate(data.node_type_names):
        frame = distributed.nodes[ntype].data
        frame[NID] = data.node_features[NID][types == type_id]
        for key, values in data.node_features.items():
            if key.startswith(f"{ntype}/"):
                frame[key.removeprefix(f"{ntype}/")] = values
    return distributed


class _ServedPartition(NamedTuple):
    """The partition that this machine serves."""

    book: Any  # DGL's partition book; its `partid` is the partition
    graph: LocalGraph  # own nodes and halo
    node_ranges: IdRanges  # of global IDs, by partition and type
    edge_ranges: IdRanges

    @classmethod
    def of(cls, dist_graph: Any) -> "_ServedPartition":
        book, local = dist_graph.get_partition_book(), dist_graph.local_partition
        if local is None:
            raise PartitionError(
                "No server of this DistGraph shares its partition with this process; expected one on the same machine. "
                "Start the trainers on the servers' machines, with the machines' own addresses in ip_config."
            )
        nodes, edges = local.ndata, local.edata
        src, dst = local.edges(order="eid")
        graph = LocalGraph(
            node_id=as_numpy(nodes[NID]),
            is_inner=as_numpy(nodes[INNER_NODE].bool()),
            edges={SRC: as_numpy(src), DST: as_numpy(dst), EID: as_numpy(edges[EID])},
        )
        node_ranges = _ranges(book._typed_nid_range, book.ntypes)
        edge_ranges = _ranges(book._typed_eid_range, book.canonical_etypes)
        served = cls(book, graph, node_ranges, edge_ranges)
        own, own_edges = graph.node_id[graph.is_inner], graph.edges[EID][graph.owned]
        (start, end), (first, last) = served.own_range, edge_ranges[served.part, [0, -1], [0, 1]].tolist()
        if not is_permutation(own, start, end) or not is_permutation(own_edges, first, last):
            raise PartitionError(
                f"The graph in this machine's shared memory, with {len(own)} own nodes, does not fit its partition "
                f"book; expected, for partition {served.part}, the nodes [{start}, {end}) and the edges [{first}, "
                f"{last}) into them. Servers of several partitions on one host overwrite each other's memory, unless "
                "each has a separate /dev/shm; a graph partitioned without halo (num_hops=0) must be partitioned again."
            )
        return served

    @property
    def part(self) -> int:
        return int(self.book.partid)

    @property
    def own_range(self) -> tuple[int, int]:
        """The partition's nodes, [start, end)."""
        return int(self.node_ranges[self.part, 0, 0]), int(self.node_ranges[self.part, -1, 1])


def _ranges(ranges: Mapping[Any, np.ndarray[Any, Any]], types: list[Any]) -> IdRanges:
    return np.stack([np.asarray(ranges[name], dtype=np.int64) for name in types], axis=1)


def _divide_nodes(served: _ServedPartition, group: Group) -> list[tuple[int, int]]:
    """The range of nodes of every worker: each served partition is divided among the trainers of its machine."""
    served_by_rank = group.gather_numbers(served.part, "partition IDs")
    num_parts = len(served.node_ranges)
    if served_by_rank != sorted(served_by_rank) or set(served_by_rank) != set(range(num_parts)):
        raise PartitionError(
            f"The workers hold the partitions {served_by_rank}, by rank; expected all of 0 to {num_parts - 1}, "
            "ascending. Open the DistGraph before torch.distributed, with ranks in the order of its "
            "get_partition_book().partid, and with trainers on every machine."
        )
    trainers = served_by_rank.count(served.part)
    trainer = served_by_rank[: group.rank].count(served.part)  # this worker's index among them
    start, end = served.own_range
    run = equal_runs(node_costs(served.graph, (start, end)), trainers)[trainer]
    return [(first, last) for first, last in group.gather_numbers([start + at for at in run], "node ranges")]


def _shards(dist_graph: Any, served: _ServedPartition, edges: VisibleEdges) -> list[ShardEdgesAndFeatures]:
    """This worker's edges with their features."""
    fields = ShardFields(edges, served.edge_ranges, torch.device("cpu"))
    for type_id, etype in enumerate(served.book.canonical_etypes):
        first, last = served.edge_ranges[served.part, type_id].tolist()
        rows, bounds = fields.rows_of(type_id)
        place = edges.edge_id[rows] - first
        for name, values in _features(dist_graph.edges[etype].data, f"edges of type {etype}", last - first):
            fields.add_feature(etype, name, values[place], bounds)
    return fields.cut()


def _node_features(dist_graph: Any, served: _ServedPartition, graph: LocalGraph) -> dict[str, Tensor]:
    """Features of this worker's nodes, the inner nodes of `graph`, as in `PartitionData`."""
    node_id = np.sort(graph.node_id[graph.is_inner])
    features = {NID: torch.from_numpy(node_id), NTYPE: torch.from_numpy(types_of(node_id, served.node_ranges))}
    first = int(node_id[0]) if len(node_id) else served.own_range[0]
    for type_id, ntype in enumerate(served.book.ntypes):
        start, end = served.node_ranges[served.part, type_id].tolist()
        low, high = (min(max(place, start), end) - start for place in (first, first + len(node_id)))
        for name, values in _features(dist_graph.nodes[ntype].data, f"nodes of type {ntype!r}", end - start):
            features[f"{ntype}/{name}"] = values[low:high]
    return features


def _features(tensors: Mapping[str, Any], what: str, count: int) -> list[tuple[str, Tensor]]:
    """This machine's rows of `DistTensor`s, sorted by name because their order differs between processes."""
    found = [(name, tensors[name].local_partition) for name in sorted(tensors)]
    for name, values in found:
        if len(values) != count:
            raise PartitionError(
                f"This machine's server holds {len(values)} rows of {name!r} for {count} {what}; expected a row for "
                "each. Partition the graph again."
            )
    return found
