"""Edge cut and balance of an assignment of nodes to partitions."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from sar.data.arrays import Array
from sar.partition.graph_source import GraphSource


class Quality(NamedTuple):
    """edge_cut: fraction of edges between partitions, 0 to 1.

    balance: largest partition / mean, at least 1, of `nodes`, `in_edges` and each weight.
    """

    edge_cut: float
    balance: dict[str, float]


def measure_quality(
    graph: GraphSource, part_of: Array, num_parts: int, weights: Mapping[str, Array] | None = None
) -> Quality:
    """Measure an assignment (N,) in one pass over the edges; `weights` are arrays (N,)."""
    cut, in_edges = 0, np.zeros(num_parts, np.int64)
    for src, dst in graph.chunks():
        cut += int((part_of[src] != part_of[dst]).sum())
        in_edges += np.bincount(part_of[dst], minlength=num_parts)
    loads = {"nodes": np.bincount(part_of, minlength=num_parts), "in_edges": in_edges}
    for name, weight in (weights or {}).items():
        loads[name] = np.bincount(part_of, weights=weight, minlength=num_parts)
    balance = {name: float(load.max() / load.mean()) if load.any() else 1.0 for name, load in loads.items()}
    return Quality(cut / max(graph.total_edges, 1), balance)
