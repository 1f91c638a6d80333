"""DGL's METIS for graphs in plain tensors."""

import torch
from torch import Tensor

from sar.adapters.dgl.partition_writer import _quiet
from sar.adapters.dgl.shim import require_dgl


def metis_parts(low: Tensor, high: Tensor, kind: Tensor, num_parts: int) -> Tensor | None:
    """Divide nodes into parts with few edges between them, and about as many nodes of each kind in every part.

    Args:
        low, high: the ends of every edge, (E,) int64; no loops and no parallel edges, on which METIS corrupts memory.
        kind: (N,) integer or bool.
        num_parts: P, at least 2.

    Returns:
        The part of every node, (N,) int64 below P, not the same in every call; None where METIS finds none.
    """
    dgl = require_dgl()
    with _quiet():
        graph = dgl.graph((low, high), num_nodes=len(kind))
        parts: Tensor | None = dgl.metis_partition_assignment(graph, num_parts, balance_ntypes=kind.to(torch.int64))
    return parts
