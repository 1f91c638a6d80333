"""Heterogeneous graphs for tests: cut in memory, also where DGL's partitioner gives up, and read from data sets."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar.common_tuples import EID, ETYPE, NID, NTYPE, ORIG_ID, CanonicalEtype, PartitionData, ShardEdgesAndFeatures


@dataclass(repr=False)
class HeteroParts:
    """A heterogeneous graph cut into partitions; rows of all workers, one after the other, have these original IDs."""

    partitions: list[PartitionData]
    node_ids: dict[str, Tensor]
    edge_ids: dict[CanonicalEtype, Tensor]  # in the visible order


def partition_hetero(graph: Any, assignment: Mapping[str, Tensor], num_partitions: int) -> HeteroParts:
    """Cut a `DGLGraph` as DGL does: nodes and edges are numbered by partition, then type, then original ID.

    Args:
        graph: the graph, with several edge types and with the features to hand out.
        assignment: partition of every node, (N_type,) for each type.
        num_partitions: number of partitions, some of which may lack types, or be empty.
    """
    ntypes, etypes = graph.ntypes, graph.canonical_etypes
    nodes = [[(assignment[t] == p).nonzero().squeeze(1) for t in ntypes] for p in range(num_partitions)]
    new_id = {t: torch.empty(graph.num_nodes(t), dtype=torch.int64) for t in ntypes}
    ranges, node = [], 0
    for mine in nodes:
        first = node
        for ntype, ids in zip(ntypes, mine, strict=True):
            new_id[ntype][ids] = torch.arange(node, node + len(ids))
            node += len(ids)
        ranges.append((first, node))

    partitions, edge = [], 0
    edge_ids: dict[CanonicalEtype, list[Tensor]] = {etype: [] for etype in etypes}
    for p, mine in enumerate(nodes):
        edges = []  # of each type: sources, destinations, partitions of the sources, edge IDs, original IDs
        for source, _, destination in etypes:
            src, dst = graph.edges(etype=etypes[len(edges)])
            ids = (assignment[destination][dst] == p).nonzero().squeeze(1)
            part, count = assignment[source][src[ids]], len(ids)
            edges.append(
                (new_id[source][src[ids]], new_id[destination][dst[ids]], part, edge + torch.arange(count), ids)
            )
            edge += count
        kinds = torch.repeat_interleave(torch.tensor([len(columns[0]) for columns in edges]))
        src, dst, part, eid, original = (torch.cat(columns) for columns in zip(*edges, strict=True))
        shards = []
        for q in range(num_partitions):
            here = (part == q).nonzero().squeeze(1)
            here = here[torch.from_numpy(np.lexsort((eid[here].numpy(), dst[here].numpy())))]
            features = {EID: eid[here], ETYPE: kinds[here], ORIG_ID: original[here]}
            for kind, etype in enumerate(etypes):
                rows = original[here][kinds[here] == kind]
                edge_ids[etype].append(rows)
                data = graph.edges[etype].data
                features |= {f"{':'.join(etype)}/{name}": data[name][rows] for name in data}
            shards.append(ShardEdgesAndFeatures((src[here], dst[here]), features))
        own = {NID: torch.arange(*ranges[p]), ORIG_ID: torch.cat(mine)}
        own[NTYPE] = torch.repeat_interleave(torch.tensor([len(ids) for ids in mine]))
        for ntype, ids in zip(ntypes, mine, strict=True):
            data = graph.nodes[ntype].data
            own |= {f"{ntype}/{name}": data[name][ids] for name in data}
        partitions.append(PartitionData(shards, ranges, own, ntypes, etypes, None))
    node_ids = {t: torch.cat([mine[number] for mine in nodes]) for number, t in enumerate(ntypes)}
    return HeteroParts(partitions, node_ids, {etype: torch.cat(rows) for etype, rows in edge_ids.items()})
