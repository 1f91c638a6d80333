"""Neighbor sampling in plain Python, the oracle of the compiled loops.

Each function does what the loop of its name in `sar/sampling/loops.py` does, on NumPy arrays; draws come from the same
random sequences, so the same edges are drawn.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

MASK = 2**64 - 1
STEP = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    """Hash 64 bits."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def draw_edges(
    rows: Array, nodes: Array, indptr: Array, weights: Array, fanout: int, replace: bool, key: int
) -> tuple[Array, Array]:
    """Draw in-edges of every row; their offsets, (n + 1,), and positions, int64."""
    drawn = []
    for row, node in zip(rows.tolist(), nodes.tolist(), strict=True):
        edges, state = range(int(indptr[row]), int(indptr[row + 1])), mix(key ^ mix((node + STEP) & MASK))
        drawn.append(_draw(edges, weights, fanout, replace, state))
    offsets = np.cumsum([0, *map(len, drawn)])
    return offsets, np.array([edge for edges in drawn for edge in edges], dtype=np.int64)


def _draw(edges: range, weights: Array, fanout: int, replace: bool, state: int) -> list[int]:
    def random(count: int) -> int:
        return mix((state + (count + 1) * STEP) & MASK)

    def uniform(count: int) -> float:
        return ((random(count) >> 11) + 1) * 2.0**-53

    possible = [edge for edge in edges if not len(weights) or weights[edge] > 0]
    if not possible:
        return []
    if replace and len(weights):
        sums = np.cumsum(np.asarray(weights[edges.start : edges.stop], dtype=np.longdouble))  # of a wider exponent
        return [edges[int(np.searchsorted(sums, uniform(k) * sums[-1]))] for k in range(fanout)]
    if replace:
        return [edges[((random(k) >> 32) * len(edges)) >> 32] for k in range(fanout)]
    if len(weights):
        keys = {edge: -math.log(uniform(edge - edges.start)) / np.longdouble(weights[edge]) for edge in possible}
        return sorted(possible, key=keys.__getitem__)[:fanout]
    order = list(edges)
    for k in range(fanout if fanout < len(order) else 0):
        j = k + (((random(k) >> 32) * (len(order) - k)) >> 32)
        order[k], order[j] = order[j], order[k]
    return order[:fanout]


def number_nodes(given: Array, known: dict[int, int]) -> Array:
    """Number nodes in the order in which they first come up; adds the new ones to `known`."""
    return np.array([known.setdefault(int(node), len(known)) for node in given], dtype=np.int64)
