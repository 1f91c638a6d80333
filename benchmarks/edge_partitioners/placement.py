"""What edge partitioners remember of the edges they have placed: where nodes have copies, and how full parts are."""

from typing import NamedTuple

import numpy as np

from benchmarks.edge_partitioners.votes import Ballot, new_ballot, vote
from sar.data.arrays import Array
from sar.partition.assign.task import compiled

BITS = 64
"""Parts in an entry of `Placement.replicas`."""
_ONE = np.uint64(1)
_NOTHING = np.uint64(0)


class Placement(NamedTuple):
    """The edges placed so far.

    replicas: (N, ceil(P / 64)) uint64, the parts in which each node has edges, as bits.
    num_edges: (P,), the edges in each part.
    lightest: (2,), the part with fewest edges when it was last asked for, and its edges then; no part before it has as
        few.
    ballot: the votes of nodes for their owners.
    """

    replicas: Array
    num_edges: Array
    lightest: Array
    ballot: Ballot


def new_placement(num_nodes: int, num_parts: int) -> Placement:
    """No edges placed."""
    replicas = np.zeros((num_nodes, -(-num_parts // BITS)), np.uint64)
    ballot = new_ballot(num_nodes, num_parts)
    return Placement(replicas, np.zeros(num_parts, np.int64), np.zeros(2, np.int64), ballot)


@compiled
def place(placement: Placement, u: int, v: int, part: int) -> None:
    """Put an edge into a part."""
    placement.num_edges[part] += 1
    for node in (u, v):
        placement.replicas[node, part // BITS] |= _ONE << np.uint64(part % BITS)
        vote(placement.ballot, node, part)


@compiled
def has_replica(placement: Placement, node: int, part: int) -> bool:
    """Whether a node has an edge in a part."""
    return bool((placement.replicas[node, part // BITS] >> np.uint64(part % BITS)) & _ONE)


@compiled
def lightest_shared(placement: Placement, u: int, v: int, capacity: int) -> int:
    """Of the parts in which both nodes have edges, the one with fewest, if below the capacity; -1 if there is none.

    Of equals, the part of the smallest number.
    """
    replicas, num_edges = placement.replicas, placement.num_edges
    best = -1
    fewest = capacity
    for entry in range(replicas.shape[1]):
        bits = replicas[u, entry] & replicas[v, entry]
        part = entry * BITS
        while bits != _NOTHING:
            if bits & _ONE != _NOTHING and num_edges[part] < fewest:
                best, fewest = part, num_edges[part]
            bits >>= _ONE
            part += 1
    return best


@compiled
def lightest_of_all(placement: Placement) -> int:
    """The part with fewest edges, the smallest number of equals."""
    num_edges, lightest = placement.num_edges, placement.lightest
    part, fewest = int(lightest[0]), lightest[1]
    while part < len(num_edges) and num_edges[part] > fewest:
        part += 1
    if part == len(num_edges):
        part = int(np.argmin(num_edges))
    lightest[0], lightest[1] = part, num_edges[part]
    return part
