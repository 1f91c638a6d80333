"""The method `spring`: streaming clustering, merging along richest neighbors, list scheduling."""

import heapq
from typing import NamedTuple

import numpy as np

from sar.data.arrays import Array
from sar.partition.assign.rebalance import rebalance
from sar.partition.assign.task import AssignmentTask, compiled, edge_chunks, follow, list_schedule, part_means, root
from sar.partition.graph_source import index_dtype

NONE = -1
"""The cluster of a node before its first edge; the richest neighbor of a node without edges."""
_ROUND_OFF = 1e-9  # relative, of sums of weights


class Neighbours(NamedTuple):
    """The criteria for representatives, (N,) each."""

    degree: Array
    richest: Array  # each node's neighbor with the largest degree, or `NONE`
    lot: Array  # a random order of nodes


class Merging(NamedTuple):
    """The state of merging K clusters."""

    of_node: Array  # (N,), the cluster of each node, before merging
    into: Array  # (K,), a forest: the cluster into which each has been merged, or itself
    weights: Array  # (K, 1 + C), number of nodes (0 after merging into another cluster) and sums of their weights
    representative: Array  # (K,), the node whose richest neighbor is in the cluster to merge with; `NONE` if none


def spring(task: AssignmentTask) -> Array:
    """SPRING (Huang et al., "SDT-GNN: streaming-based distributed training framework for GNNs", algorithm 1).

    1. *Clustering* (Hollocou et al., 2017): if the ends of an edge are in two clusters whose volumes (sums of degrees)
       are at most tau, the end in the smaller cluster moves to the other cluster. Each node records its richest
       neighbor, the one with the largest degree.
    2. *Merging*: from the smallest cluster on, a cluster joins that of the richest neighbor of its representative, the
       node with the richest such neighbor, if the two have at most beta N / P nodes together.
    3. *Assignment*: clusters go, the largest first, to the part with the smallest load.

    Two passes over the edges, one for the degrees; O(N) memory, O(E + N log N) time. beta is 1 + `task.imbalance`.

    Where the paper is ambiguous:

    - tau is not given. We use `task.volume_bound` times the mean volume of a part, by default half of it. A part then
      consists of at least two clusters, which list scheduling can balance. Smaller values hardly change
      the cut; larger values reduce balance.
    - The pseudo code sorts clusters once before merging (line 21). The text inserts a merged cluster at the rank of its
      new size, with the better of the two representatives. We follow the text: the merged cluster precedes clusters of
      equal size, and is visited again even if it was visited before.
    - Among equally rich representatives, the pseudo code takes the first, a footnote a random one. We draw one by
      `task.seed`, as well as the order of clusters of equal size. Among equally rich neighbors, the first in the stream
      is kept (lines 16, 17).
    - Volumes and sizes equal to their thresholds are allowed, as in lines 9 and 24; the text says "smaller".
    - Nodes without edges, which algorithm 1 ignores, are separate clusters.
    - Self-loops carry no information and are skipped.
    - Directed edges count at both ends: the degree is in-degree plus out-degree.

    The paper has no weights. With weights, a merged cluster must not exceed beta times the mean of any weight, the load
    of a part is its largest load relative to the mean, and `rebalance` runs last. Without weights the result is
    the paper's, unless it leaves a part above beta N / P.
    """
    weights = task.constraints().weights
    degree = np.zeros(task.graph.total_nodes, index_dtype(2 * task.graph.total_edges))
    for src, dst in edge_chunks(task, "counting degrees"):
        _count_degrees(src, dst, degree)
    of_node, num_clusters, richest = _cluster_nodes(task, degree)
    rng = np.random.default_rng(task.seed)
    neighbours = Neighbours(degree, richest, rng.permutation(len(degree)).astype(of_node.dtype))
    order = rng.permutation(num_clusters)
    merging = Merging(
        of_node=of_node,
        into=np.arange(num_clusters, dtype=of_node.dtype),
        weights=np.zeros((num_clusters, weights.shape[1])),
        representative=np.full(num_clusters, NONE, of_node.dtype),
    )
    _add_nodes(weights, neighbours, merging)
    means = part_means(weights, task.num_parts)
    _merge(order, means * (1 + task.imbalance) * (1 + _ROUND_OFF), neighbours, merging)
    task.progress("assigning clusters", 1.0)
    # Lines 26 to 29.
    size = merging.weights[:, 0]
    left = order[size[order] > 0]
    left = left[np.argsort(-size[left], kind="stable")]
    part_of_cluster = np.empty(len(order), np.int32)
    part_of_cluster[left] = list_schedule(merging.weights[left], means, np.zeros((task.num_parts, len(means))))
    follow(merging.into)
    if task.clusters is not None:
        task.clusters.extend((of_node, merging.into))
    return rebalance(task, part_of_cluster[merging.into[merging.of_node]])


def _cluster_nodes(task: AssignmentTask, degree: Array) -> tuple[Array, int, Array]:
    """Lines 2 to 17: the cluster of every node, (N,); the number of clusters; the richest neighbors, (N,)."""
    tau = int(degree.sum(dtype=np.int64) * task.volume_bound / task.num_parts)
    of_node = np.full(len(degree), NONE, index_dtype(len(degree)))
    volume = np.zeros(len(degree), np.int64)  # the sum of degrees of each cluster
    richest = np.full_like(of_node, NONE)
    num_clusters = 0
    for src, dst in edge_chunks(task, "clustering nodes"):
        num_clusters = _cluster_edges(src, dst, tau, degree, of_node, volume, richest, num_clusters)
    alone = np.flatnonzero(of_node == NONE)
    of_node[alone] = np.arange(num_clusters, num_clusters + len(alone))
    return of_node, num_clusters + len(alone), richest


@compiled
def _count_degrees(src: Array, dst: Array, degree: Array) -> None:
    """Add the degree of every node, without self-loops."""
    for i in range(len(src)):
        if src[i] != dst[i]:
            degree[src[i]] += 1
            degree[dst[i]] += 1


@compiled
def _cluster_edges(
    src: Array, dst: Array, tau: int, degree: Array, of_node: Array, volume: Array, richest: Array, num_clusters: int
) -> int:
    """Cluster a chunk of edges (Hollocou et al., 2017); return the number of clusters so far."""
    for i in range(len(src)):
        u, v = src[i], dst[i]
        if u == v:
            continue
        for node in (u, v):
            if of_node[node] == NONE:
                of_node[node] = num_clusters
                volume[num_clusters] = degree[node]
                num_clusters += 1
        of_u, of_v = of_node[u], of_node[v]
        if of_u != of_v and volume[of_u] <= tau and volume[of_v] <= tau:
            moves, target = (u, of_v) if volume[of_u] <= volume[of_v] else (v, of_u)
            volume[of_node[moves]] -= degree[moves]
            volume[target] += degree[moves]
            of_node[moves] = target
        if richest[u] == NONE or degree[richest[u]] < degree[v]:
            richest[u] = v
        if richest[v] == NONE or degree[richest[v]] < degree[u]:
            richest[v] = u
    return num_clusters


@compiled
def _add_nodes(weights: Array, neighbours: Neighbours, merging: Merging) -> None:
    """Add the nodes to their clusters' weights and representatives."""
    for node in range(len(merging.of_node)):
        one = merging.of_node[node]
        for k in range(weights.shape[1]):
            merging.weights[one, k] += weights[node, k]
        merging.representative[one] = _richer(merging.representative[one], node, neighbours)


@compiled
def _richer(one: int, other: int, neighbours: Neighbours) -> int:
    """The node with the richer richest neighbor; ties are broken by `lot`."""
    degree, richest, lot = neighbours
    if other == NONE or richest[other] == NONE:
        return one
    if one == NONE or richest[one] == NONE:
        return other
    better = degree[richest[other]] - degree[richest[one]]
    return other if better > 0 or (better == 0 and lot[other] < lot[one]) else one


@compiled
def _merge(order: Array, most: Array, neighbours: Neighbours, merging: Merging) -> None:
    """Lines 18 to 25: merge clusters, smallest first; among equal sizes, the one that reached its size last.

    order: (K,), the reversed order of clusters of equal size.
    most: (1 + C,), the limit of a merged cluster for each weight.
    """
    size, representative = merging.weights[:, 0], merging.representative
    # (size, - when it was added, cluster); outdated if the cluster has grown since.
    queue = [(size[one], -i, one) for i, one in enumerate(order) if 0 < size[one] <= most[0]]
    heapq.heapify(queue)
    added = len(order)
    while len(queue) > 0:
        size_then, _, one = heapq.heappop(queue)
        node = representative[one]
        if size_then != size[one] or node == NONE:
            continue
        target = root(merging.into, merging.of_node[neighbours.richest[node]])
        fits = target != one
        for k in range(most.size):
            fits = fits and merging.weights[one, k] + merging.weights[target, k] <= most[k]
        if not fits:
            continue
        merging.into[one] = target
        for k in range(most.size):
            merging.weights[target, k] += merging.weights[one, k]
        size[one] = 0
        representative[target] = _richer(representative[target], node, neighbours)
        heapq.heappush(queue, (size[target], -added, np.int64(target)))
        added += 1
