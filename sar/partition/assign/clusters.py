"""Clusters of nodes in a stream of edges, how they begin and change (Hollocou et al., 2017)."""

from sar.partition.assign.compiled import compiled
from sar.partition.graph_data import Array

NONE = -1
"""The cluster of a node before its first edge."""


@compiled
def open_clusters(u: int, v: int, degree: Array, cluster: Array, volume: Array, num_clusters: int) -> int:
    """Let the ends of an edge that are in no cluster begin one each; the number of clusters so far.

    Args:
        u, v: the ends.
        degree: (N,).
        cluster: of every node, (N,).
        volume: the sum of degrees of each cluster, (N,).
        num_clusters: before.
    """
    for node in (u, v):
        if cluster[node] == NONE:
            cluster[node] = num_clusters
            volume[num_clusters] = degree[node]
            num_clusters += 1
    return num_clusters


@compiled
def move(node: int, target: int, degree: Array, cluster: Array, volume: Array) -> None:
    """Put a node into another cluster; the arguments are those of `open_clusters`."""
    volume[cluster[node]] -= degree[node]
    volume[target] += degree[node]
    cluster[node] = target
