"""Edges between parts, and the nodes that they come from, counted in one pass over a stream of edges."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from sar.partition.assign.compiled import compiled
from sar.partition.assign.stream import check_ends
from sar.partition.graph_data import Array


class Crossing(NamedTuple):
    """What leads from parts to parts, P of them.

    edges: (P, P) int64, edges from nodes of part p to nodes of part q; q stores them.
    halo: (P, P) int64, nodes of part p with an edge into part q: the rows that p sends to q. The diagonal is 0.
    """

    edges: Array
    halo: Array


def count_crossing(chunks: Iterable[tuple[Array, Array]], part_of: Array, num_parts: int) -> Crossing:
    """Count edges and halo rows; memory is P / 8 bytes a node, rounded up.

    Args:
        chunks: sources and destinations, each a node from 0 to N - 1.
        part_of: (N,) integers from 0 to P - 1.
        num_parts: P.

    Raises:
        ConfigError: an edge ends outside the graph.
    """
    crossing = Crossing(*np.zeros((2, num_parts, num_parts), np.int64))
    seen = np.zeros((len(part_of), (num_parts + 7) // 8), np.uint8)
    done = 0
    for src, dst in chunks:
        check_ends(src, dst, len(part_of), done)
        done += len(src)
        _count(src, dst, part_of, crossing, seen)
    return crossing


@compiled
def _count(src: Array, dst: Array, part_of: Array, crossing: Crossing, seen: Array) -> None:
    """Add some edges; bit q of row v of `seen` tells whether v is in the halo of part q already."""
    for i in range(src.size):
        p, q = part_of[src[i]], part_of[dst[i]]
        crossing.edges[p, q] += 1
        bit = np.uint8(1 << (q & 7))
        if p != q and not seen[src[i], q >> 3] & bit:
            seen[src[i], q >> 3] |= bit
            crossing.halo[p, q] += 1
