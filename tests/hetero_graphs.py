"""Heterogeneous graphs for tests: cut in memory, also where DGL's partitioner gives up, and read from data sets."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar.adapters.dgl.shim import has_dgl, require_dgl
from sar.common_tuples import EID, ETYPE, NID, NTYPE, ORIG_ID, CanonicalEtype, PartitionData, ShardEdgesAndFeatures

COUNTS = {"paper": 40, "author": 25, "topic": 20}
RELATIONS = {
    ("author", "writes", "paper"): 120,
    ("paper", "written by", "author"): 110,
    ("paper", "cites", "paper"): 90,
    ("paper", "about", "topic"): 40,
}
WIDTH, OUT = 4, 3


class _Edges(dict[CanonicalEtype, SimpleNamespace]):
    def __call__(self, *, etype: CanonicalEtype | None = None) -> Any:
        return self[etype or next(iter(self))].ends


class _TypedGraph:
    """What `partition_hetero` and tests of PyTorch Geometric ask of a `DGLGraph`."""

    def __init__(self, edges: Mapping[CanonicalEtype, tuple[Tensor, Tensor]], num_nodes: Mapping[str, int]) -> None:
        self.ntypes, self.canonical_etypes = sorted(num_nodes), sorted(edges)
        self.nodes = {ntype: SimpleNamespace(data={}) for ntype in num_nodes}
        self.edges = _Edges({etype: SimpleNamespace(data={}, ends=ends) for etype, ends in edges.items()})
        self._num_nodes, self.device = num_nodes, torch.device("cpu")

    def num_nodes(self, ntype: str | None = None) -> int:
        return sum(self._num_nodes.values()) if ntype is None else self._num_nodes[ntype]

    def num_edges(self, etype: CanonicalEtype | None = None) -> int:
        return sum(len(self.edges(etype=one)[0]) for one in ([etype] if etype else self.edges))

    def in_degrees(self) -> Tensor:
        return torch.bincount(self.edges()[1], minlength=self.num_nodes())


def heterograph(edges: Mapping[CanonicalEtype, tuple[Tensor, Tensor]], num_nodes: Mapping[str, int]) -> Any:
    """A graph on one machine: of DGL, or of the tests' own class if DGL is not installed."""
    return require_dgl().heterograph(edges, num_nodes) if has_dgl() else _TypedGraph(edges, num_nodes)


def whole_graph(without: Collection[str] = (), kept: Mapping[str, slice] | None = None) -> Any:
    """The graph, empty of some node types and relations, and with some edges only of the relations in `kept`."""
    counts = {t: 0 if t in without else count for t, count in COUNTS.items()}
    relations = {etype: 0 if set(etype) & set(without) else count for etype, count in RELATIONS.items()}
    generator = torch.Generator().manual_seed(1)
    edges = {
        etype: [torch.randint(max(counts[etype[end]], 1), (count,), generator=generator) for end in (0, 2)]
        for etype, count in relations.items()
    }
    rows = {etype: (kept or {}).get(etype[1], slice(None)) for etype in relations}
    graph = heterograph({etype: (src[rows[etype]], dst[rows[etype]]) for etype, (src, dst) in edges.items()}, counts)
    for ntype, count in counts.items():
        graph.nodes[ntype].data["x"] = torch.randn(count, WIDTH, generator=generator)
        graph.nodes[ntype].data["cotangent"] = torch.randn(count, 8, generator=generator)
    for etype, count in relations.items():
        graph.edges[etype].data["w"] = torch.rand(count, 1, generator=generator)[rows[etype]] + 0.5
    return graph


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
