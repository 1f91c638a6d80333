"""How good an assignment of nodes to parts is, measured in one pass over the edges."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sar.data.arrays import Array
from sar.partition.assign.task import compiled
from sar.partition.graph_source import GraphSource, check_parts

_ROWS = 1 << 17  # edges read at a time


@dataclass(frozen=True)
class Quality:
    """What parts cost, P of them.

    nodes: (P,) int64.
    edges: (P, P) int64, edges from nodes of part p to nodes of part q; q stores them.
    halo: (P, P) int64, nodes of part p with an edge into part q: the rows that p sends to q. The diagonal is 0.
    weights: (P,) float64 by name, the sums of what else is to be balanced.
    """

    nodes: Array
    edges: Array
    halo: Array
    weights: Mapping[str, Array]

    @property
    def in_edges(self) -> Array:  # (P,)
        """Edges into the nodes of each part."""
        in_edges: Array = self.edges.sum(axis=0)
        return in_edges

    @property
    def edge_cut(self) -> float:
        """Share of the edges that lead from one part into another, 0 to 1."""
        total = int(self.edges.sum())
        return (total - int(self.edges.trace())) / total if total else 0.0

    @property
    def replication_factor(self) -> float:
        """(inner nodes + halo nodes of all parts) / nodes."""
        total = int(self.nodes.sum())
        return 1 + int(self.halo.sum()) / total if total else 1.0

    @property
    def balance(self) -> dict[str, float]:
        """The largest part's share over the mean, 1 or more, of `nodes`, `in_edges` and each weight."""
        loads = {"nodes": self.nodes, "in_edges": self.in_edges, **self.weights}
        return {name: float(load.max() / load.mean()) if load.any() else 1.0 for name, load in loads.items()}


def measure_quality(
    graph: GraphSource, part_of: Array, num_parts: int, weights: Mapping[str, Array] | None = None
) -> Quality:
    """Measure an assignment.

    Memory: P / 8 bytes a node (rounded up), 16 P^2 and a few MB.

    Args:
        graph: its edges are read once.
        part_of: (N,) integers from 0 to P - 1.
        num_parts: P.
        weights: (N,) numbers each, by name.

    Raises:
        ConfigError: `part_of` has another length, or parts that do not exist.
    """
    check_parts(part_of, graph.total_nodes, num_parts, "the assignment")
    edges, halo = np.zeros((2, num_parts, num_parts), np.int64)
    seen = np.zeros((len(part_of), (num_parts + 7) // 8), np.uint8)
    for src, dst in graph.chunks(_ROWS):
        _count_crossing(src, dst, part_of, edges, halo, seen)
    sums = {name: np.bincount(part_of, weights=weight, minlength=num_parts) for name, weight in (weights or {}).items()}
    return Quality(np.bincount(part_of, minlength=num_parts), edges, halo, sums)


@compiled
def _count_crossing(src: Array, dst: Array, part_of: Array, edges: Array, halo: Array, seen: Array) -> None:
    """Count some edges and the halo, (P, P) each; bit q of row v of `seen` tells if v is in the halo of part q."""
    for i in range(src.size):
        p, q = part_of[src[i]], part_of[dst[i]]
        edges[p, q] += 1
        bit = np.uint8(1 << (q & 7))
        if p != q and not seen[src[i], q >> 3] & bit:
            seen[src[i], q >> 3] |= bit
            halo[p, q] += 1
