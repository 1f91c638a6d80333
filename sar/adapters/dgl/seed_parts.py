"""METIS for mini-batches: divides seed nodes so that those which read the same nodes come together."""

import torch
from torch import Tensor

from sar.adapters.dgl.partition_writer import _quiet
from sar.adapters.dgl.shim import require_dgl


def metis_parts(src: Tensor, dst: Tensor, is_seed: Tensor, num_parts: int) -> Tensor | None:
    """Divide the nodes of a graph with few edges between parts, and about as many seeds in each.

    DGL passes METIS no weights but these: it balances the other nodes, too.

    Args:
        src: sources, (E,) int64.
        dst: destinations, (E,) int64.
        is_seed: (N,) bool.
        num_parts: P, at least 2.

    Returns:
        The part of every node, (N,) int64 below P; None where METIS finds none.
    """
    dgl = require_dgl()
    with _quiet():
        graph = dgl.graph((src, dst), num_nodes=len(is_seed))
        parts: Tensor | None = dgl.metis_partition_assignment(graph, num_parts, balance_ntypes=is_seed.to(torch.int64))
    return parts
