"""METIS for mini-batches: divides seed nodes so that those which read the same nodes come together."""

import numpy as np
import torch
from torch import Tensor

from sar.adapters.metis import METIS_INTEGER, AdjacencyLists, metis_parts

IMBALANCE = 0.03
"""How many more seeds than the mean a part may have: 3 %, METIS's own default."""


def seed_parts(src: Tensor, dst: Tensor, is_seed: Tensor, num_parts: int) -> Tensor | None:
    """Divide the nodes of a graph with few edges between parts, and about as many seeds in each.

    Args:
        src: sources, (E,) int64.
        dst: destinations, (E,) int64.
        is_seed: (N,) bool.
        num_parts: P, at least 2.

    Returns:
        The part of every node, (N,) int64 below P; None where no edge joins two nodes.

    Raises:
        PartitionError: METIS finds no such parts.
    """
    lists = _adjacency_lists(src, dst, len(is_seed))
    if not len(lists.neighbours):
        return None
    node_weights = is_seed.numpy()[:, None]
    return torch.from_numpy(metis_parts(lists, node_weights, num_parts, imbalance=IMBALANCE, seed=0).astype(np.int64))


def _adjacency_lists(src: Tensor, dst: Tensor, num_nodes: int) -> AdjacencyLists:
    """Edges in both directions, without loops and parallel ones."""
    low, high = torch.minimum(src, dst), torch.maximum(src, dst)
    pairs = (low * num_nodes + high)[low != high].unique()
    low, high = pairs // num_nodes, pairs % num_nodes
    start, end = torch.cat([low, high]), torch.cat([high, low])
    indptr = np.zeros(num_nodes + 1, METIS_INTEGER)
    np.cumsum(torch.bincount(start, minlength=num_nodes).numpy(), out=indptr[1:])
    neighbours = end[start.argsort(stable=True)].numpy()
    return AdjacencyLists(indptr, neighbours.astype(METIS_INTEGER, copy=False))
