"""METIS for mini-batches: divides seed nodes so that those which read the same nodes come together."""

import importlib.util
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar.adapters.dgl.metis import metis_parts


def seed_parts(src: Tensor, dst: Tensor, is_seed: Tensor, num_parts: int) -> Tensor | None:
    """Divide the nodes of a graph with few edges between parts, and about as many seeds in each.

    With `pymetis` equal graphs get equal parts; DGL's METIS, which serves where that is not installed, draws anew, and
    balances the other nodes, too.

    Args:
        src: sources, (E,) int64.
        dst: destinations, (E,) int64.
        is_seed: (N,) bool.
        num_parts: P, at least 2.

    Returns:
        The part of every node, (N,) int64 below P; None where METIS finds none.
    """
    num_nodes = len(is_seed)
    # METIS writes beyond its buffers where a node has more edges than there are nodes: no loops, no parallel edges.
    apart = src != dst
    low, high = torch.minimum(src, dst)[apart], torch.maximum(src, dst)[apart]
    pairs = (low * num_nodes + high).unique()
    low, high = pairs // num_nodes, pairs % num_nodes
    if importlib.util.find_spec("pymetis") is None:
        return metis_parts(low, high, is_seed, num_parts)
    import pymetis

    start, end = torch.cat([low, high]), torch.cat([high, low])
    offsets = np.concatenate([[0], torch.bincount(start, minlength=num_nodes).cumsum(0).numpy()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of xadj; what takes its place is not in older versions
        found: Any = pymetis.part_graph(
            num_parts,
            xadj=offsets,
            adjncy=end[start.argsort(stable=True)].numpy(),
            vweights=is_seed.long().numpy(),
            recursive=False,
            options=pymetis.Options(seed=0),
        )
    return torch.as_tensor(np.asarray(found[1]), dtype=torch.int64)
