"""Features of remote nodes that are read often, kept by their reader."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sar.kernels.neighbor_sampling import Numbering
from sar.sampling.local_graph import Features, LocalGraph
from sar.sampling.packing import Form


@dataclass
class FeatureCache:
    """Input features of chosen remote nodes.

    nodes: global IDs of every type, (n,) int64 each.
    features: their input features, rows in this order.
    """

    nodes: dict[str, Tensor]
    features: Features
    _index: dict[str, Numbering] = field(default_factory=dict, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return FeatureCache, (self.nodes, self.features)  # another process makes its own index

    def find(self, ntype: str, nodes: Tensor) -> Tensor:
        """Rows of the nodes in the cache, -1 for those that are not in it."""
        if ntype not in self.nodes:
            return torch.full_like(nodes, -1)
        if ntype not in self._index:
            known = self.nodes[ntype]
            self._index[ntype] = Numbering(len(known), 2**63 - 1)
            self._index[ntype].add(known)
        return self._index[ntype].find(nodes)


def choose_hot_nodes(graph: LocalGraph, nbytes: int) -> dict[str, Tensor]:
    """The remote nodes with input features that have the most edges into this worker, as many as fit; global IDs.

    A node with more out-edges here is drawn more often. Nodes are taken by edges per byte of their features.
    """
    worth, size, ids, kinds = [], [], [], []
    start, end = graph.node_ranges[graph.rank]
    for kind, (ntype, tables) in enumerate(graph.inputs.items()):
        width = sum(Form.of(table).nbytes(1) for table in tables.values())
        sources = [relation.src for relation in graph.relations if relation.etype[0] == ntype]
        remote = torch.cat(sources).long() if sources else torch.empty(0, dtype=torch.int64)
        nodes, degrees = remote[(remote < start) | (remote >= end)].unique(return_counts=True)
        worth.append(degrees / max(width, 1))
        size.append(torch.full_like(nodes, width))
        ids.append(nodes)
        kinds.append(torch.full_like(nodes, kind))
    if not ids:
        return {}
    order = torch.argsort(torch.cat(worth), descending=True, stable=True)
    order = order[torch.cat(size)[order].cumsum(0) <= nbytes]
    chosen, of = torch.cat(ids)[order], torch.cat(kinds)[order]
    return {ntype: chosen[of == kind].sort().values for kind, ntype in enumerate(graph.inputs)}
