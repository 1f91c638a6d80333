"""The method `greedy`: edges where their ends already are."""

import numpy as np

from benchmarks.edge_partitioners.placement import (
    Placement,
    lightest_of_all,
    lightest_shared,
    new_placement,
    place,
)
from benchmarks.edge_partitioners.votes import choose_owners
from sar.data.arrays import Array
from sar.partition.assign.task import AssignmentTask, compiled, count_degrees, edge_chunks


def greedy(task: AssignmentTask) -> Array:
    """The greedy vertex cut of PowerGraph (Gonzalez et al., 2012, section 4.2).

    With A(v) for the parts that have edges of v, an edge (u, v) goes to the lightest part of A(u) & A(v); where these
    share none, of A(w), w being the end with more edges still to come, or of the other end's set; where both are empty,
    to the lightest part of all. Light is a part with few edges; of equals, the one of the smallest number.

    The paper sets no bound on parts, and a stream in order of nodes may then end up in a single one; so a part that
    holds (1 + `task.imbalance`) E / P edges is passed over. A node's owner is the part that got most of its edges: see
    [Note: owners of nodes] in `votes.py`. Self-loops are passed over.

    Two passes over the edges, one for the degrees; N P bits of memory beside O(N).

    Returns:
        The part of every node, (N,) int32.
    """
    num_nodes, num_parts = task.graph.total_nodes, task.num_parts
    to_come = count_degrees(task)
    capacity = int(np.ceil((1 + task.imbalance) * (to_come.sum(dtype=np.int64) // 2) / num_parts))
    placement = new_placement(num_nodes, num_parts)
    for src, dst in edge_chunks(task, "assigning edges"):
        _place_edges(src, dst, to_come, capacity, placement)
    return choose_owners(task, placement.ballot)


@compiled
def _place_edges(src: Array, dst: Array, to_come: Array, capacity: int, placement: Placement) -> None:
    for i in range(len(src)):
        u, v = src[i], dst[i]
        if u == v:
            continue
        part = lightest_shared(placement, u, v, capacity)
        if part < 0:
            more, less = (u, v) if to_come[u] >= to_come[v] else (v, u)
            part = lightest_shared(placement, more, more, capacity)
            if part < 0:
                part = lightest_shared(placement, less, less, capacity)
        if part < 0:
            part = lightest_of_all(placement)
        place(placement, u, v, part)
        to_come[u] -= 1
        to_come[v] -= 1
