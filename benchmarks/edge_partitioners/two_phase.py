"""The method `2ps-l`: streaming clustering, then edges to one of the two parts of their ends' clusters."""

from typing import NamedTuple

import numpy as np

from benchmarks.edge_partitioners.placement import (
    Placement,
    has_replica,
    lightest_of_all,
    new_placement,
    place,
)
from benchmarks.edge_partitioners.votes import choose_owners
from sar.data.arrays import Array
from sar.partition.assign.spring import Clusters, move, no_clusters, open_clusters
from sar.partition.assign.task import AssignmentTask, compiled, count_degrees, edge_chunks, list_schedule

_ROUND_OFF = 1e-9  # scores that are equal may be added up to different last digits


class PlacementRule(NamedTuple):
    """What decides where an edge goes, beside the edges placed before.

    clusters: of the nodes.
    part_of_cluster: (K,) int32.
    hashed: (N,) int32, the part to which each node is hashed.
    capacity: edges that a part may hold.
    """

    clusters: Clusters
    part_of_cluster: Array
    hashed: Array
    capacity: int


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
    most of its edges: see [Note: owners of nodes] in `votes.py`. Self-loops are passed over.

    Four passes over the edges; N P bits of memory beside O(N).

    Returns:
        The part of every node, (N,) int32.
    """
    num_nodes, num_parts = task.graph.total_nodes, task.num_parts
    degree = count_degrees(task)
    total = int(degree.sum(dtype=np.int64))
    clusters, num_clusters = _cluster_nodes(task, degree, most=-(-total // num_parts))
    part_of_cluster = _assign_clusters(clusters.volume[:num_clusters], num_parts)
    hashed = np.random.default_rng(task.seed).integers(num_parts, size=num_nodes, dtype=np.int32)
    capacity = int(np.ceil((1 + task.imbalance) * (total // 2) / num_parts))
    rule = PlacementRule(clusters, part_of_cluster, hashed, capacity)
    placement = new_placement(num_nodes, num_parts)
    for doing, within in (("assigning edges within parts", True), ("assigning the other edges", False)):
        for src, dst in edge_chunks(task, doing):
            _place_edges(src, dst, within, rule, placement)
    return choose_owners(task, placement.ballot)


def _cluster_nodes(task: AssignmentTask, degree: Array, most: int) -> tuple[Clusters, int]:
    """Clusters of all nodes with edges, and their number."""
    clusters = no_clusters(degree)
    num_clusters = 0
    for src, dst in edge_chunks(task, "clustering nodes"):
        num_clusters = _cluster_edges(src, dst, most, clusters, num_clusters)
    return clusters, num_clusters


def _assign_clusters(volume: Array, num_parts: int) -> Array:
    """The part of every cluster, (K,) int32."""
    order = np.argsort(-volume, kind="stable")
    part = np.empty(len(volume), np.int32)
    part[order] = list_schedule(volume[order, None], np.ones(1), np.zeros((num_parts, 1)))
    return part


@compiled
def _cluster_edges(src: Array, dst: Array, most: int, clusters: Clusters, num_clusters: int) -> int:
    """Cluster a chunk of edges; the number of clusters so far."""
    degree, of_node, volume = clusters
    for i in range(len(src)):
        u, v = src[i], dst[i]
        if u == v:
            continue
        num_clusters = open_clusters(clusters, u, v, num_clusters)
        of_u, of_v = of_node[u], of_node[v]
        if of_u == of_v or volume[of_u] > most or volume[of_v] > most:
            continue
        goes, stays = (u, v) if volume[of_u] - degree[u] <= volume[of_v] - degree[v] else (v, u)
        if volume[of_node[stays]] + degree[goes] <= most:
            move(clusters, goes, of_node[stays])
    return num_clusters


@compiled
def _place_edges(src: Array, dst: Array, within: bool, rule: PlacementRule, placement: Placement) -> None:
    """Place those edges of a chunk whose ends' clusters are in one part, or all others."""
    degree, of_node, volume = rule.clusters
    num_edges, hashed = placement.num_edges, rule.hashed
    for i in range(len(src)):
        u, v = src[i], dst[i]
        if u == v:
            continue
        part, other = rule.part_of_cluster[of_node[u]], rule.part_of_cluster[of_node[v]]
        if (part == other) != within:
            continue
        if part != other:
            at_u, at_v = volume[of_node[u]], volume[of_node[v]]
            score = _score(u, v, part, at_u / (at_u + at_v), degree, placement)
            score_of_other = _score(u, v, other, at_v / (at_u + at_v), degree, placement)
            if score_of_other > score + _ROUND_OFF:
                part = other
        if num_edges[part] >= rule.capacity:
            part = hashed[u] if degree[u] >= degree[v] else hashed[v]
        if num_edges[part] >= rule.capacity:
            part = lightest_of_all(placement)
        place(placement, u, v, part)


@compiled
def _score(u: int, v: int, part: int, share_of_volume: float, degree: Array, placement: Placement) -> float:
    """Score of a part that has the cluster of one end of (u, v)."""
    score = share_of_volume
    for node in (u, v):
        if has_replica(placement, node, part):
            score += 2 - degree[node] / (degree[u] + degree[v])
    return score
