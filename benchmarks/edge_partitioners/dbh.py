"""The method `dbh`: edges by the hash of their lower-degree end."""

import numpy as np

from benchmarks.edge_partitioners.votes import Ballot, choose_owners, new_ballot, vote
from sar.data.arrays import Array
from sar.partition.assign.task import AssignmentTask, compiled, count_degrees, edge_chunks


def dbh(task: AssignmentTask) -> Array:
    """Degree-based hashing (Xie et al., "Distributed power-law graph computing", 2014).

    An edge goes to the part that its end of lower degree is hashed to (of equals, its destination), so that hubs are
    copied rather than nodes of few edges. The hash is a table of random parts drawn by `task.seed`. A node's owner is
    the part that got most of its edges: see [Note: owners of nodes] in `votes.py`. Self-loops are passed over.

    Hashing looks at no more than degrees, so the cut is about that of random parts: it is here to compare with. Two
    passes over the edges, O(N) memory.

    Returns:
        The part of every node, (N,) int32.
    """
    num_nodes = task.graph.total_nodes
    degree = count_degrees(task)
    hashed = np.random.default_rng(task.seed).integers(task.num_parts, size=num_nodes, dtype=np.int32)
    ballot = new_ballot(num_nodes, task.num_parts)
    for src, dst in edge_chunks(task, "assigning edges"):
        _place_edges(src, dst, degree, hashed, ballot)
    return choose_owners(task, ballot)


@compiled
def _place_edges(src: Array, dst: Array, degree: Array, hashed: Array, ballot: Ballot) -> None:
    for i in range(len(src)):
        u, v = src[i], dst[i]
        if u != v:
            part = hashed[u] if degree[u] < degree[v] else hashed[v]
            vote(ballot, u, part)
            vote(ballot, v, part)
