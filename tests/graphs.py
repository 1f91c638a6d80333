"""Graphs for tests: random ones, their `PartitionData` made in memory, and the single-machine graph to compare with."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sar.common_tuples import EID, NID, ORIG_ID, PartitionData, ShardEdgesAndFeatures
from sar.partition.graph_source import ONLY_TYPE
from tests.hetero_graphs import heterograph

DATA = Path(os.environ.get("SAR_TEST_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")


class EdgeList(NamedTuple):
    """A graph as read from anywhere: original node IDs, edge ID = position."""

    src: Tensor  # (E,)
    dst: Tensor  # (E,)
    num_nodes: int


def random_graph(
    seed: int,
    num_nodes: int,
    num_edges: int,
    *,
    self_loops: bool = True,
    multi_edges: bool = True,
    isolated: int = 0,
    no_in_edges: int = 0,
) -> EdgeList:
    """Draw edges; the last `isolated` nodes have none, the `no_in_edges` before them only out-edges."""
    random = np.random.default_rng(seed)
    sources = num_nodes - isolated
    destinations = sources - no_in_edges
    count = num_edges if min(sources, destinations) > 0 else 0
    src = random.integers(0, max(sources, 1), count)
    dst = random.integers(0, max(destinations, 1), count)
    if multi_edges and count > 1:
        src[-count // 4 :], dst[-count // 4 :] = src[0], dst[0]
    if self_loops and count > 2:
        src[1 : 1 + count // 8] = dst[1 : 1 + count // 8]
    edges = np.stack([src, dst])
    if not self_loops:
        edges = edges[:, edges[0] != edges[1]]
    if not multi_edges:
        edges = edges[:, np.sort(np.unique(edges, axis=1, return_index=True)[1])]
    return EdgeList(torch.from_numpy(edges[0].copy()), torch.from_numpy(edges[1].copy()), num_nodes)


@dataclass(repr=False)
class PartitionedGraph:
    """A graph cut into partitions, and the same graph whole, in the new node order and the visible edge order.

    Row i of a whole-graph tensor here belongs to new node i, or to the i-th edge in the order: destination's partition,
    source's partition, destination, edge ID. Both orders are partition-major, so each worker's rows are one slice.
    """

    partitions: list[PartitionData]
    src: Tensor  # (E,) new node IDs
    dst: Tensor  # (E,)
    num_nodes: int
    node_ids: Tensor  # (N,) original ID of every new node
    edge_ids: Tensor  # (E,) original ID of every edge in the visible order
    node_counts: list[int]
    edge_counts: list[int]

    def reference(self) -> Any:
        """The single-machine `dgl.DGLGraph`, or its stand-in, whose per-node edge order is the visible order."""
        return heterograph({ONLY_TYPE: (self.src, self.dst)}, {"_N": self.num_nodes})

    def original(self) -> Any:
        """As `reference`, with edges in the order of their original IDs, in which DGL gives messages to functions."""
        order = self.edge_ids.argsort()
        return heterograph({ONLY_TYPE: (self.src[order], self.dst[order])}, {"_N": self.num_nodes})

    def split_nodes(self, rows: Tensor) -> list[Tensor]:
        return list(rows.split(self.node_counts))

    def split_edges(self, rows: Tensor) -> list[Tensor]:
        return list(rows.split(self.edge_counts))


def partition_in_memory(
    graph: EdgeList,
    assignment: Tensor,
    num_partitions: int,
    edge_features: Mapping[str, Tensor] | None = None,
    node_features: Mapping[str, Tensor] | None = None,
) -> PartitionedGraph:
    """Cut a graph as DGL does: new node IDs partition-major, edges with their destination, edge IDs partition-major.

    Args:
        graph: the graph, in original IDs.
        assignment: partition of every node, (N,).
        num_partitions: number of partitions, some of which may be empty.
        edge_features: by name, in the original edge order, (E, ...).
        node_features: by name, in the original node order, (N, ...).
    """
    node_ids = torch.argsort(assignment, stable=True)
    new_id = torch.empty_like(node_ids)
    new_id[node_ids] = torch.arange(graph.num_nodes)
    src_part, dst_part = assignment[graph.src].numpy(), assignment[graph.dst].numpy()
    new_edge_id = np.empty(len(dst_part), dtype=np.int64)
    new_edge_id[np.argsort(dst_part, kind="stable")] = np.arange(len(dst_part))
    order = torch.from_numpy(np.lexsort((new_edge_id, new_id[graph.dst].numpy(), src_part, dst_part)))

    src, dst = new_id[graph.src][order], new_id[graph.dst][order]
    features = {EID: torch.from_numpy(new_edge_id), ORIG_ID: torch.arange(len(new_edge_id)), **(edge_features or {})}
    node_counts = torch.bincount(assignment, minlength=num_partitions).tolist()
    shards = np.zeros((num_partitions, num_partitions), dtype=np.int64)
    np.add.at(shards, (dst_part, src_part), 1)
    ends = np.cumsum(node_counts).tolist()

    partitions = []
    edge, node = 0, 0
    for rank in range(num_partitions):
        all_shard_edges = []
        for count in shards[rank].tolist():
            rows = slice(edge, edge + count)
            shard_features = {name: values[order[rows]].clone() for name, values in features.items()}
            all_shard_edges.append(ShardEdgesAndFeatures((src[rows].clone(), dst[rows].clone()), shard_features))
            edge += count
        mine = node_ids[node : node + node_counts[rank]]
        own = {f"_N/{name}": values[mine].clone() for name, values in (node_features or {}).items()}
        own |= {NID: torch.arange(node, node + node_counts[rank]), ORIG_ID: mine.clone()}
        node += node_counts[rank]
        ranges = [(end - count, end) for end, count in zip(ends, node_counts, strict=True)]
        partitions.append(PartitionData(all_shard_edges, ranges, own, ["_N"], [("_N", "_E", "_N")], None))
    edge_counts = shards.sum(axis=1).tolist()
    return PartitionedGraph(partitions, src, dst, graph.num_nodes, node_ids, order, node_counts, edge_counts)
