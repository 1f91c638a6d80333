"""Clusters of nodes in a stream of edges: how they begin and change (Hollocou et al., 2017)."""

from typing import NamedTuple

import numpy as np

from sar.partition.assign.compiled import compiled
from sar.partition.assign.stream import index_dtype
from sar.partition.graph_data import Array

NONE = -1
"""The cluster of a node before its first edge."""


class Clusters(NamedTuple):
    """Clusters while the edges come by.

    degree: (N,), of every node.
    of_node: (N,), the cluster of every node, or `NONE`.
    volume: (N,) int64, the sum of degrees of each cluster.
    """

    degree: Array
    of_node: Array
    volume: Array


def no_clusters(degree: Array) -> Clusters:
    """Nodes of these degrees, (N,), in no clusters yet."""
    of_node = np.full(len(degree), NONE, index_dtype(len(degree)))
    return Clusters(degree, of_node, np.zeros(len(degree), np.int64))


@compiled
def open_clusters(clusters: Clusters, u: int, v: int, num_clusters: int) -> int:
    """Let the ends of an edge that are in no cluster begin one each; the number of clusters so far."""
    for node in (u, v):
        if clusters.of_node[node] == NONE:
            clusters.of_node[node] = num_clusters
            clusters.volume[num_clusters] = clusters.degree[node]
            num_clusters += 1
    return num_clusters


@compiled
def move(clusters: Clusters, node: int, target: int) -> None:
    """Put a node into another cluster."""
    clusters.volume[clusters.of_node[node]] -= clusters.degree[node]
    clusters.volume[target] += clusters.degree[node]
    clusters.of_node[node] = target
