"""Neighbor sampling on CPU tensors: draws of in-edges, numbering of nodes, copies of rows."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from sar.kernels.threads import run_balanced
from sar.tensors.ids import to_offsets
from sar.tensors.splitmix import STEP, mix
from sar.tensors.views import materialize

ALL = 2**62  # a fan-out that no degree exceeds
MOST_WEIGHT = 1e200  # so that sums of scaled weights are finite: see `loops.SCALE`

_NONE = np.empty(0, np.int64)
_NODE_WORK = 16  # cost of a drawn edge, in elements as `threads` counts them


@cache
def _loops() -> ModuleType:
    """The compiled loops, imported at the first use, because Numba takes long to load."""
    from sar.sampling import loops

    return loops


def draw_in_edges(
    rows: Tensor, nodes: Tensor, indptr: Tensor, weights: Tensor | None, fanout: int, replace: bool, key: int
) -> tuple[Tensor, Tensor]:
    """Draw `fanout` in-edges of each node, or all if it has no more; see [Note: draws] in `loops.py`.

    Args:
        rows: (n,) int64, the nodes' rows in `indptr`.
        nodes: (n,) int64, their global IDs, which select their random numbers.
        indptr: (N + 1,) int64; the in-edges of row i have the positions indptr[i]:indptr[i + 1].
        weights: (E,) floating point by position, from 0 (never drawn) to `MOST_WEIGHT`; None for uniform draws.
        fanout: edges of each node, or `ALL`.
        replace: draw `fanout` edges independently for each node with in-edges.
        key: 64 bits; equal keys give equal draws.

    Returns:
        (n + 1,) offsets, and the positions of the drawn edges, grouped by node; int64.
    """
    replace = replace and fanout != ALL
    arguments = (rows.numpy(), nodes.numpy(), indptr.numpy(), np.empty(0) if weights is None else weights.numpy())
    longest = int((indptr[rows + 1] - indptr[rows]).max()) if len(rows) else 0
    counts = torch.empty_like(rows)
    per_node = (arguments[0], *arguments[2:], fanout, replace, counts.numpy())
    run_balanced(_loops().count_draws, len(rows), _NODE_WORK, *per_node)
    offsets = to_offsets(counts)
    picked = torch.empty(int(offsets[-1]), dtype=torch.int64, device="cpu")
    ends = offsets.numpy()
    given = (*arguments, replace, np.uint64(key), ends, picked.numpy())
    run_balanced(_loops().draw_edges, ends, _NODE_WORK, *given, private=lambda: (np.arange(longest), np.empty(longest)))
    return offsets, picked


class Numbering:
    """Numbers up to `capacity` nodes with IDs below `num_nodes` from 0, in order of first appearance."""

    def __init__(self, capacity: int, num_nodes: int) -> None:
        self._nodes = torch.empty(min(capacity, num_nodes), dtype=torch.int64, device="cpu")
        self._count = np.zeros(1, np.int64)
        bits = max(2 * len(self._nodes) - 1, 1).bit_length()
        self._slots = np.full(2**bits, -1, np.int32 if 2**bits < 2**31 else np.int64)
        # If every ID has a slot of its own there is nothing to hash.
        direct = num_nodes <= len(self._slots)
        self._hash = (np.uint64(1), np.uint64(0)) if direct else (STEP, np.uint64(64 - bits))

    @property
    def nodes(self) -> Tensor:
        """The node of every number, int64."""
        return self._nodes[: int(self._count[0])]

    def add(self, nodes: Tensor) -> Tensor:
        """Return the numbers of these nodes, (n,) int64; new nodes get the next numbers."""
        numbers = torch.empty(len(nodes), dtype=torch.int64, device="cpu")
        table = (self._slots, *self._hash, self._nodes.numpy(), self._count)
        _loops().number_nodes(nodes.numpy(), *table, numbers.numpy())
        return numbers


def copy_rows(table: Tensor, rows: Tensor | None, out: Tensor, places: Tensor | None) -> None:
    """out[places] = table[rows] for contiguous tensors of equal dtype and width; None stands for all in order."""
    count = len(rows) if rows is not None else len(table)
    if not count or not out.numel():
        return
    table, nbytes = materialize(table), out[0].nbytes
    word = next(
        dtype
        for dtype in (torch.int64, torch.int32, torch.uint8)
        if nbytes % dtype.itemsize == 0 and not (table.data_ptr() | out.data_ptr()) % dtype.itemsize
    )
    source, target = (tensor.detach().reshape(-1).view(torch.uint8).view(word).numpy() for tensor in (table, out))
    indices = [_NONE if index is None else index.numpy() for index in (rows, places)]
    width = nbytes // word.itemsize
    run_balanced(_loops().copy_rows, count, width, source, indices[0], target, indices[1], np.uint64(width))


def derive_key(key: int, *numbers: int) -> int:
    """A key, 63 bits, that belongs to a key and to numbers below 2**64."""
    for number in numbers:
        [mixed] = mix(np.array([(key + int(STEP) * (number + 1)) % 2**64], np.uint64))
        key = int(mixed)
    return key >> 1


def random_key() -> int:
    """A key, 63 bits, drawn from torch's random state."""
    return int(torch.randint(2**63 - 1, (), device="cpu"))
