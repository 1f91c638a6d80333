"""What edge partitioners remember of the edges they have placed: where nodes have copies, and how full parts are."""

import numpy as np

from sar.partition.assign.compiled import compiled
from sar.partition.graph_data import Array

WORD = 64
_ONE = np.uint64(1)
_NOTHING = np.uint64(0)


def no_replicas(num_nodes: int, num_parts: int) -> Array:
    """Sets of parts, one for each node, as bits: (N, ceil(P / 64)) uint64."""
    return np.zeros((num_nodes, -(-num_parts // WORD)), np.uint64)


@compiled
def add_replica(replicas: Array, node: int, part: int) -> None:
    """Note that a node has an edge in a part."""
    replicas[node, part // WORD] |= _ONE << np.uint64(part % WORD)


@compiled
def has_replica(replicas: Array, node: int, part: int) -> bool:
    """Whether a node has an edge in a part."""
    return bool((replicas[node, part // WORD] >> np.uint64(part % WORD)) & _ONE)


@compiled
def lightest_shared(replicas: Array, u: int, v: int, num_edges: Array, capacity: int) -> int:
    """Of the parts in which both nodes have edges, the one with fewest, if below the capacity; -1 if there is none.

    num_edges: (P,), the edges in each part. Of equals, the part of the smallest number.
    """
    best = -1
    fewest = capacity
    for word in range(replicas.shape[1]):
        bits = replicas[u, word] & replicas[v, word]
        part = word * WORD
        while bits != _NOTHING:
            if bits & _ONE != _NOTHING and num_edges[part] < fewest:
                best, fewest = part, num_edges[part]
            bits >>= _ONE
            part += 1
    return best


@compiled
def lightest_of_all(num_edges: Array, lightest: Array) -> int:
    """The part with fewest edges, the smallest number of equals; edges have only been added since the last call.

    lightest: (2,), that part at the last call and its edges then; no part before it has as few.
    """
    part, fewest = int(lightest[0]), lightest[1]
    while part < len(num_edges) and num_edges[part] > fewest:
        part += 1
    if part == len(num_edges):
        part = int(np.argmin(num_edges))
    lightest[0], lightest[1] = part, num_edges[part]
    return part
