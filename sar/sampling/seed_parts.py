"""METIS for mini-batches: divides seed nodes so that those which read the same nodes come together."""

import numpy as np
import torch
from torch import Tensor

from sar.adapters.dgl.metis import metis_of_lists, simple_edges
from sar.adapters.pymetis import has_pymetis, metis_dtype, part_graph_kway
from sar.errors import PartitionError

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
        The part of every node, (N,) int64 below P; None where METIS finds none.
    """
    num_nodes = len(is_seed)
    low, high = simple_edges(torch.minimum(src, dst), torch.maximum(src, dst), num_nodes)
    start, end = torch.cat([low, high]), torch.cat([high, low])
    indptr = torch.zeros(num_nodes + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(start, minlength=num_nodes), 0, out=indptr[1:])
    neighbours, weights = end[start.argsort(stable=True)], is_seed.long().unsqueeze(1)
    try:
        if not has_pymetis():
            return metis_of_lists(indptr, neighbours, weights, num_parts)
        dtype = metis_dtype()
        of_edges = np.empty(0, dtype)
        columns = [column.numpy().astype(dtype) for column in (indptr, neighbours, weights)]
        found = part_graph_kway(columns[0], columns[1], of_edges, columns[2], num_parts, IMBALANCE, seed=0, trials=1)
    except PartitionError:
        return None
    return torch.from_numpy(found.astype(np.int64))
