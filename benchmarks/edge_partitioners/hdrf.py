"""The method `hdrf`: edges where their ends already are, with copies of high-degree nodes rather than others."""

import numpy as np

from benchmarks.edge_partitioners.placement import (
    BITS,
    Placement,
    has_replica,
    lightest_of_all,
    new_placement,
    place,
)
from benchmarks.edge_partitioners.votes import choose_owners
from sar.data.arrays import Array
from sar.partition.assign.task import AssignmentTask, compiled, edge_chunks
from sar.partition.graph_source import index_dtype

LAMBDA = 1.1
"""Weight of the balance in the score."""


def hdrf(task: AssignmentTask) -> Array:
    """High-degree replicated first (Petroni et al., "HDRF: stream-based partitioning for power-law graphs", 2015).

    With d(v) for the edges of v seen so far, theta(u) = d(u) / (d(u) + d(v)) and theta(v) = 1 - theta(u), an edge
    (u, v) goes to the part p with the highest score, the smallest number of equals:

        score(p) = g(u, p) + g(v, p) + lambda (M - n_p) / (1 + M - m)
        g(w, p)  = 2 - theta(w) if p has edges of w, else 0

    n_p being the edges in p, M and m the most and fewest in any part. lambda is 1.1: up to 1, balance only decides
    between equals, and a stream in order of nodes ends up in a single part, as the paper shows; far above, it is all
    that counts. A node's owner is the part that got most of its edges: see [Note: owners of nodes] in `votes.py`.
    Self-loops are passed over.

    One pass over the edges; N P bits of memory beside O(N).

    Returns:
        The part of every node, (N,) int32.
    """
    num_nodes, num_parts = task.graph.total_nodes, task.num_parts
    seen = np.zeros(num_nodes, index_dtype(2 * task.graph.total_edges))
    placement = new_placement(num_nodes, num_parts)
    for src, dst in edge_chunks(task, "assigning edges"):
        _place_edges(src, dst, seen, placement)
    return choose_owners(task, placement.ballot)


@compiled
def _place_edges(src: Array, dst: Array, seen: Array, placement: Placement) -> None:
    most = placement.num_edges.max()
    for i in range(len(src)):
        u, v = src[i], dst[i]
        if u == v:
            continue
        seen[u] += 1
        seen[v] += 1
        part = _best_part(u, v, seen, placement, most)
        place(placement, u, v, part)
        most = max(most, placement.num_edges[part])


@compiled
def _best_part(u: int, v: int, seen: Array, placement: Placement, most: int) -> int:
    """The part with the highest score, which is one that has edges of u or v, or the lightest of all."""
    replicas, num_edges = placement.replicas, placement.num_edges
    lightest = lightest_of_all(placement)
    theta = seen[u] / (seen[u] + seen[v])
    scale = LAMBDA / (1 + most - num_edges[lightest])
    best, highest = lightest, -1.0
    for entry in range(replicas.shape[1]):
        bits = replicas[u, entry] | replicas[v, entry]
        part = entry * BITS
        while bits != np.uint64(0):
            if bits & np.uint64(1) != np.uint64(0):
                score = scale * (most - num_edges[part])
                if has_replica(placement, u, part):
                    score += 2 - theta
                if has_replica(placement, v, part):
                    score += 1 + theta
                if score > highest:
                    best, highest = part, score
            bits >>= np.uint64(1)
            part += 1
    balance_alone = scale * (most - num_edges[lightest])
    if balance_alone > highest or (balance_alone == highest and lightest < best):
        best = lightest
    return best
