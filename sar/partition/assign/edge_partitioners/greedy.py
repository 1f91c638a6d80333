"""The method `greedy`: edges where their ends already are."""

import numpy as np

from sar.partition.assign.assignment import AssignmentTask
from sar.partition.assign.compiled import compiled
from sar.partition.assign.edge_partitioners.owners import Ballot, choose_owners, new_ballot, vote
from sar.partition.assign.edge_partitioners.replicas import add_replica, lightest_of_all, lightest_shared, no_replicas
from sar.partition.assign.stream import count_degrees, edge_chunks
from sar.partition.graph_data import Array


def greedy(task: AssignmentTask) -> Array:
    """The greedy vertex cut of PowerGraph (Gonzalez et al., 2012, section 4.2).

    With A(v) for the parts that have edges of v, an edge (u, v) goes to the lightest part of A(u) & A(v); where these
    share none, of A(w), w being the end with more edges still to come, or of the other end's set; where both are empty,
    to the lightest part of all. Light is a part with few edges; of equals, the one of the smallest number.

    The paper sets no bound on parts, and a stream in order of nodes may then end up in a single one; so a part that
    holds (1 + `task.imbalance`) E / P edges is passed over. A node's owner is the part that got most of its edges: see
    [Note: owners of nodes] in `owners.py`. Self-loops are passed over.

    Two passes over the edges, one for the degrees; N P bits of memory beside O(N).

    Returns:
        The part of every node, (N,) int32.
    """
    num_nodes, num_parts = task.graph.total_nodes, task.num_parts
    to_come = count_degrees(task)
    capacity = int(np.ceil((1 + task.imbalance) * (to_come.sum(dtype=np.int64) // 2) / num_parts))
    replicas, ballot = no_replicas(num_nodes, num_parts), new_ballot(num_nodes, num_parts)
    num_edges, lightest = np.zeros(num_parts, np.int64), np.zeros(2, np.int64)
    for src, dst in edge_chunks(task, "assigning edges"):
        _place_edges(src, dst, to_come, capacity, replicas, num_edges, lightest, ballot)
    return choose_owners(task, ballot)


@compiled
def _place_edges(
    src: Array,
    dst: Array,
    to_come: Array,
    capacity: int,
    replicas: Array,
    num_edges: Array,
    lightest: Array,
    ballot: Ballot,
) -> None:
    for i in range(len(src)):
        u, v = src[i], dst[i]
        if u == v:
            continue
        part = lightest_shared(replicas, u, v, num_edges, capacity)
        if part < 0:
            more, less = (u, v) if to_come[u] >= to_come[v] else (v, u)
            part = lightest_shared(replicas, more, more, num_edges, capacity)
            if part < 0:
                part = lightest_shared(replicas, less, less, num_edges, capacity)
        if part < 0:
            part = lightest_of_all(num_edges, lightest)
        num_edges[part] += 1
        for node in (u, v):
            to_come[node] -= 1
            add_replica(replicas, node, part)
            vote(ballot, node, part)
