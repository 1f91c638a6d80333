"""Counts edges, and the distinct nodes that they come from, by who owns these: what workers send each other."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sar.id_slices import distinct


class EdgeSources:
    """Of the edges into one owner's nodes, whether a partition or a worker.

    edges: (R, W) edges of each type by the owner of their source.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], own: int, num_types: int) -> None:
        self._ends = torch.tensor([end for _, end in ranges])
        self._own, self._shape = own, (num_types, len(ranges))
        self._num_nodes = max(ranges[-1][1], 1)
        self._read = [torch.empty(0, dtype=torch.int64)]  # pairs of edge type and another's node, as one number
        self.edges: NDArray[np.int64] = np.zeros(self._shape, np.int64)

    def add(self, kind: Tensor, src: Tensor) -> None:
        """Count more edges: their types and the global IDs of their sources, (n,) int64."""
        owner = torch.searchsorted(self._ends, src, right=True)
        self.edges += self._count(kind, owner)
        others = owner != self._own
        self._read.append(distinct((kind * self._num_nodes + src)[others]))

    def rows(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Distinct nodes of each other owner that edges come from: (R, W) by edge type, and (W,) of all."""
        pairs = distinct(torch.cat(self._read))
        self._read = [pairs]
        kind, src = pairs // self._num_nodes, pairs % self._num_nodes
        every = distinct(src)
        by_type = self._count(kind, torch.searchsorted(self._ends, src, right=True))
        return by_type, np.bincount(torch.searchsorted(self._ends, every, right=True), minlength=self._shape[1])

    def _count(self, kind: Tensor, owner: Tensor) -> NDArray[np.int64]:
        num_types, owners = self._shape
        counts: NDArray[np.int64] = np.bincount(kind * owners + owner, minlength=num_types * owners)
        return counts.reshape(self._shape)
