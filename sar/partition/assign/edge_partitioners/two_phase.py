"""The method `2ps-l`: streaming clustering, then edges to one of the two parts of their ends' clusters."""

import numpy as np

from sar.partition.assign.assignment import AssignmentTask
from sar.partition.assign.balance import deal
from sar.partition.assign.clusters import NONE, move, open_clusters
from sar.partition.assign.compiled import compiled
from sar.partition.assign.edge_partitioners.owners import Ballot, choose_owners, new_ballot, vote
from sar.partition.assign.edge_partitioners.replicas import add_replica, has_replica, lightest_of_all, no_replicas
from sar.partition.assign.stream import count_degrees, edge_chunks, index_dtype
from sar.partition.graph_data import Array

_ROUND_OFF = 1e-9  # scores that are equal may be added up to different last digits


def two_phase(task: AssignmentTask) -> Array:
    """2PS-L (Mayer et al., "Out-of-core edge partitioning at linear run-time", 2022).

    1. *Clustering*: of an edge whose ends' clusters have a volume (sum of degrees) of at most V, the end whose cluster
       has the smaller volume without it joins the other's, if that stays within V. One pass; V is the mean volume of a
       part.
    2. Clusters go, by descending volume, to the part of the least volume.
    3. Edges whose ends' clusters are in one part go there; in a pass of their own, before all others.
    4. Every other edge goes to the part p of the cluster of u or to that of v, whichever has the higher score (of
       equals, the former):

           score(p) = g(u, p) + g(v, p) + s(u, p) + s(v, p)
           g(w, p)  = 2 - d(w) / (d(u) + d(v)) if p has edges of w, else 0
           s(w, p)  = vol(w) / (vol(u) + vol(v)) if the cluster of w is in p, else 0

       with d for the degree and vol for the volume of the node's cluster.

    A part holds at most (1 + `task.imbalance`) E / P edges. An edge that finds its part full goes where its end of
    higher degree is hashed to, and if that is full as well, to the lightest part. A node's owner is the part that got
    most of its edges: see [Note: owners of nodes] in `owners.py`. Self-loops are passed over.

    Four passes over the edges; N P bits of memory beside O(N).

    Returns:
        The part of every node, (N,) int32.
    """
    num_nodes, num_parts = task.graph.total_nodes, task.num_parts
    degree = count_degrees(task)
    total = int(degree.sum(dtype=np.int64))
    cluster, volume = _cluster_nodes(task, degree, most=-(-total // num_parts))
    part_of_cluster = _assign_clusters(volume, num_parts)
    hashed = np.random.default_rng(task.seed).integers(num_parts, size=num_nodes, dtype=np.int32)
    replicas, ballot = no_replicas(num_nodes, num_parts), new_ballot(num_nodes, num_parts)
    num_edges, lightest = np.zeros(num_parts, np.int64), np.zeros(2, np.int64)
    capacity = int(np.ceil((1 + task.imbalance) * (total // 2) / num_parts))
    for doing, within in (("assigning edges within parts", True), ("assigning the other edges", False)):
        for src, dst in edge_chunks(task, doing):
            _place_edges(src, dst, within, cluster, volume, part_of_cluster, degree, hashed, capacity,
                         replicas, num_edges, lightest, ballot)  # fmt: skip
    return choose_owners(task, ballot)


def _cluster_nodes(task: AssignmentTask, degree: Array, most: int) -> tuple[Array, Array]:
    """The cluster of every node, (N,), -1 for nodes without edges, and the volumes of the clusters, (K,) int64."""
    cluster = np.full(len(degree), NONE, index_dtype(len(degree)))
    volume = np.zeros(len(degree), np.int64)
    num_clusters = 0
    for src, dst in edge_chunks(task, "clustering nodes"):
        num_clusters = _cluster_edges(src, dst, degree, most, cluster, volume, num_clusters)
    return cluster, volume[:num_clusters]


def _assign_clusters(volume: Array, num_parts: int) -> Array:
    """The part of every cluster, (K,) int32."""
    order = np.argsort(-volume, kind="stable")
    part = np.empty(len(volume), np.int32)
    no_weights = np.empty((0, len(volume)))
    part[order] = deal(volume[order], no_weights, np.ones(1), np.zeros((1, num_parts)))
    return part


@compiled
def _cluster_edges(
    src: Array, dst: Array, degree: Array, most: int, cluster: Array, volume: Array, num_clusters: int
) -> int:
    """Cluster a chunk of edges; the number of clusters so far."""
    for i in range(len(src)):
        u, v = src[i], dst[i]
        if u == v:
            continue
        num_clusters = open_clusters(u, v, degree, cluster, volume, num_clusters)
        of_u, of_v = cluster[u], cluster[v]
        if of_u == of_v or volume[of_u] > most or volume[of_v] > most:
            continue
        goes, stays = (u, v) if volume[of_u] - degree[u] <= volume[of_v] - degree[v] else (v, u)
        if volume[cluster[stays]] + degree[goes] <= most:
            move(goes, cluster[stays], degree, cluster, volume)
    return num_clusters


@compiled
def _place_edges(
    src: Array,
    dst: Array,
    within: bool,
    cluster: Array,
    volume: Array,
    part_of_cluster: Array,
    degree: Array,
    hashed: Array,
    capacity: int,
    replicas: Array,
    num_edges: Array,
    lightest: Array,
    ballot: Ballot,
) -> None:
    """Place those edges of a chunk whose ends' clusters are in one part, or all others."""
    for i in range(len(src)):
        u, v = src[i], dst[i]
        if u == v:
            continue
        part, other = part_of_cluster[cluster[u]], part_of_cluster[cluster[v]]
        if (part == other) != within:
            continue
        if part != other:
            volumes = volume[cluster[u]], volume[cluster[v]]
            at_u = _score(u, v, part, volumes[0] / (volumes[0] + volumes[1]), degree, replicas)
            at_v = _score(u, v, other, volumes[1] / (volumes[0] + volumes[1]), degree, replicas)
            if at_v > at_u + _ROUND_OFF:
                part = other
        if num_edges[part] >= capacity:
            part = hashed[u] if degree[u] >= degree[v] else hashed[v]
        if num_edges[part] >= capacity:
            part = lightest_of_all(num_edges, lightest)
        num_edges[part] += 1
        for node in (u, v):
            add_replica(replicas, node, part)
            vote(ballot, node, part)


@compiled
def _score(u: int, v: int, part: int, share_of_volume: float, degree: Array, replicas: Array) -> float:
    """Score of a part that has the cluster of one end of (u, v)."""
    score = share_of_volume
    for node in (u, v):
        if has_replica(replicas, node, part):
            score += 2 - degree[node] / (degree[u] + degree[v])
    return score
