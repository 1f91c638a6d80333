"""The method `spring`: streaming clustering, merging along richest neighbours, list scheduling."""

import numpy as np

from sar.partition.assign.assignment import AssignmentTask
from sar.partition.assign.balance import Constraints, constraints, deal
from sar.partition.assign.clusters import NONE, move, open_clusters
from sar.partition.assign.compiled import compiled
from sar.partition.assign.settle import settle
from sar.partition.assign.stream import count_degrees, edge_chunks, index_dtype
from sar.partition.graph_data import Array

_OUT = -2
Queue = tuple[Array, Array, Array]
"""Clusters by size, those of a size in a list: the first of each size; and before and after each cluster, or `_OUT`."""


def spring(task: AssignmentTask) -> Array:
    """SPRING (Huang et al., "SDT-GNN: streaming-based distributed training framework for GNNs", algorithm 1).

    1. *Clustering* (Hollocou et al., 2017): of an edge whose ends are in two clusters, neither of which has a volume
       (sum of degrees) above tau, the end in the smaller volume moves to the other's cluster. Each node notes its
       richest neighbour, the one with the largest degree.
    2. *Merging*: from the smallest cluster on, a cluster joins that of the richest neighbour of its representative, the
       node with the richest such neighbour, if the two have at most beta N / P nodes together.
    3. *Assignment*: clusters go, the largest first, to the least occupied part.

    Two passes over the edges, one for the degrees; O(N) memory, O(E + N log N) time. beta is 1 + `task.imbalance`.

    The paper leaves open or says in two ways:

    - tau is not given. Here it is half the mean volume of a part, so that a part is made of two clusters or more and
      list scheduling has something to balance. Smaller values hardly change the cut; larger ones cost balance.
    - The pseudo code sorts clusters once before merging (line 21); the text puts a merged cluster at the rank of its
      new size, with the better of the two representatives. As in the text: it goes before clusters of equal size, and
      is looked at again even if it had been passed before.
    - The pseudo code takes the first of equally rich representatives, a footnote a random one: a random one, drawn by
      `task.seed`, and so are the orders of clusters of equal size. Of equally rich neighbours the first in the stream
      stays (lines 16, 17).
    - Volumes and sizes equal to their thresholds are allowed, as in lines 9 and 24; the text says "smaller".
    - Nodes without edges, which algorithm 1 does not see, are clusters of their own.
    - A self-loop says nothing about where a node belongs, and is passed over.
    - Directed edges count at both ends: the degree is in-degree plus out-degree.

    Weights of the task are not in the paper: a merged cluster must not exceed beta times the mean of any of them, a
    part is as occupied as its largest load relative to the mean, and `settle` has the last word. Without weights the
    result is the paper's, unless it leaves a part above beta N / P.

    Returns:
        The part of every node, (N,) int32.
    """
    rules = constraints(task.graph.total_nodes, task.num_parts, task.weights, task.imbalance)
    degree = count_degrees(task)
    half_a_part = int(degree.sum(dtype=np.int64)) // (2 * task.num_parts)
    cluster, num_clusters, richest = _cluster_nodes(task, degree, tau=half_a_part)
    clusters = _Clusters(cluster, num_clusters, richest, degree, rules.weights, task.seed)
    clusters.merge(rules.means * (1 + task.imbalance) * (1 + 1e-9))
    task.progress("assigning clusters", 1.0)
    parts = clusters.assign(rules, task.num_parts)
    return settle(task, parts)


def _cluster_nodes(task: AssignmentTask, degree: Array, tau: int) -> tuple[Array, int, Array]:
    """Lines 2 to 17: the cluster of every node, (N,); the number of clusters; the richest neighbours, (N,).

    Nodes without edges have clusters of their own, and no richest neighbour, -1.
    """
    ids = index_dtype(len(degree))
    cluster, richest = np.full(len(degree), NONE, ids), np.full(len(degree), NONE, ids)
    volume = np.zeros(len(degree), np.int64)
    num_clusters = 0
    for src, dst in edge_chunks(task, "clustering nodes"):
        num_clusters = _cluster_edges(src, dst, degree, tau, cluster, richest, volume, num_clusters)
    alone = np.flatnonzero(cluster == NONE)
    cluster[alone] = np.arange(num_clusters, num_clusters + len(alone))
    return cluster, num_clusters + len(alone), richest


class _Clusters:
    """Clusters of nodes, as they are merged and assigned.

    of_node: (N,), the cluster of each node, before merging.
    into: (K,), a forest: the cluster into which each has been merged, or itself.
    size: (K,), the number of nodes; 0 for clusters that have been merged into others.
    weight: (C, K), the nodes' weights.
    representative: (K,), the node that leads to a cluster to merge with; -1 where there is none.
    lot, order: (N,) and (K,), random orders of nodes and clusters.
    """

    def __init__(self, cluster: Array, num_clusters: int, richest: Array, degree: Array, weights: Array, seed: int):
        rng = np.random.default_rng(seed)
        self.of_node, self.richest, self.degree = cluster, richest, degree
        self.lot = rng.permutation(len(cluster)).astype(cluster.dtype)
        self.order = rng.permutation(num_clusters)
        self.into = np.arange(num_clusters, dtype=cluster.dtype)
        self.size = np.zeros(num_clusters, np.int64)
        self.weight = np.zeros((len(weights), num_clusters))
        self.representative = np.full(num_clusters, NONE, cluster.dtype)
        _describe(cluster, weights, richest, degree, self.lot, self.size, self.weight, self.representative)

    def merge(self, most: Array) -> None:
        """Lines 18 to 25; `most`: (1 + C,), the number of nodes and the weights that a merged cluster may have."""
        ids = self.of_node.dtype
        first = np.full(min(int(most[0]), len(self.of_node)) + 1, NONE, ids)
        queue = first, np.full(len(self.size), _OUT, ids), np.empty(len(self.size), ids)
        _merge(self.of_node, self.richest, self.degree, self.lot, self.order, most, queue,
               self.into, self.size, self.weight, self.representative)  # fmt: skip

    def assign(self, rules: Constraints, num_parts: int) -> Array:
        """Lines 26 to 29: the part of every node, (N,) int32."""
        left = self.order[self.size[self.order] > 0]
        left = left[np.argsort(-self.size[left], kind="stable")]
        part_of_cluster = np.empty(len(self.size), np.int32)
        loads = np.zeros((len(rules.means), num_parts))
        part_of_cluster[left] = deal(self.size[left], self.weight[:, left], rules.means, loads)
        _follow(self.into)
        parts: Array = part_of_cluster[self.into[self.of_node]]
        return parts


@compiled
def _cluster_edges(
    src: Array, dst: Array, degree: Array, tau: int, cluster: Array, richest: Array, volume: Array, num_clusters: int
) -> int:
    """Cluster a chunk of edges; the number of clusters so far."""
    for i in range(len(src)):
        u, v = src[i], dst[i]
        if u == v:
            continue
        num_clusters = open_clusters(u, v, degree, cluster, volume, num_clusters)
        of_u, of_v = cluster[u], cluster[v]
        if of_u != of_v and volume[of_u] <= tau and volume[of_v] <= tau:
            if volume[of_u] <= volume[of_v]:
                move(u, of_v, degree, cluster, volume)
            else:
                move(v, of_u, degree, cluster, volume)
        if richest[u] == NONE or degree[richest[u]] < degree[v]:
            richest[u] = v
        if richest[v] == NONE or degree[richest[v]] < degree[u]:
            richest[v] = u
    return num_clusters


@compiled
def _describe(
    cluster: Array,
    weights: Array,
    richest: Array,
    degree: Array,
    lot: Array,
    size: Array,
    weight: Array,
    representative: Array,
) -> None:
    """Sizes, weights and representatives of clusters."""
    for node in range(len(cluster)):
        its = cluster[node]
        size[its] += 1
        for which in range(len(weights)):
            weight[which, its] += weights[which, node]
        representative[its] = _richer(representative[its], node, richest, degree, lot)


@compiled
def _richer(one: int, other: int, richest: Array, degree: Array, lot: Array) -> int:
    """The node with the richer richest neighbour; of equals, the one that the lot falls on."""
    if other == NONE or richest[other] == NONE:
        return one
    if one == NONE or richest[one] == NONE:
        return other
    better = degree[richest[other]] - degree[richest[one]]
    return other if better > 0 or (better == 0 and lot[other] < lot[one]) else one


@compiled
def _merge(
    cluster: Array,
    richest: Array,
    degree: Array,
    lot: Array,
    order: Array,
    most: Array,
    queue: Queue,
    into: Array,
    size: Array,
    weight: Array,
    representative: Array,
) -> None:
    """Merge clusters from the smallest on.

    A merged cluster is larger than the one at hand, so the queue is gone through once, from size 1 upwards.
    """
    first, before, _ = queue
    for one in order:
        if 0 < size[one] < len(first):
            _enqueue(one, size[one], queue)
    for rank in range(1, len(first)):
        while first[rank] != NONE:
            one = first[rank]
            _dequeue(one, rank, queue)
            node = representative[one]
            if node == NONE:
                continue
            target = _root(into, cluster[richest[node]])
            fits = target != one and size[one] + size[target] <= most[0]
            for which in range(len(weight)):
                fits = fits and weight[which, one] + weight[which, target] <= most[1 + which]
            if not fits:
                continue
            if before[target] != _OUT:
                _dequeue(target, size[target], queue)
            into[one] = target
            size[target] += size[one]
            size[one] = 0
            for which in range(len(weight)):
                weight[which, target] += weight[which, one]
            representative[target] = _richer(representative[target], node, richest, degree, lot)
            _enqueue(target, size[target], queue)


@compiled
def _enqueue(one: int, rank: int, queue: Queue) -> None:
    """Put a cluster before all others of its size."""
    first, before, after = queue
    before[one], after[one] = NONE, first[rank]
    if first[rank] != NONE:
        before[first[rank]] = one
    first[rank] = one


@compiled
def _dequeue(one: int, rank: int, queue: Queue) -> None:
    first, before, after = queue
    if before[one] == NONE:
        first[rank] = after[one]
    else:
        after[before[one]] = after[one]
    if after[one] != NONE:
        before[after[one]] = before[one]
    before[one] = _OUT


@compiled
def _root(into: Array, one: int) -> int:
    """Where a cluster has ended up; halves the path there."""
    while into[one] != one:
        into[one] = into[into[one]]
        one = into[one]
    return one


@compiled
def _follow(into: Array) -> None:
    for one in range(len(into)):
        into[one] = _root(into, one)
