"""METIS (Karypis and Kumar, 1998), in the library that the package `pymetis` brings.

`pymetis.part_graph` balances one weight: of an (N, K) array it takes the first N numbers, without a word (measured with
2025.2.2). So METIS's own function (manual 5.1.0, section 5.7), which balances K of them, is called in the same library.
"""

import ctypes
from typing import Any, NamedTuple

import numpy as np
import pymetis
import pymetis._internal

from sar.data.arrays import Array
from sar.errors import PartitionError

METIS_INTEGER: Any = pymetis.zero_copy_dtype()  # the integers of the installed METIS
_NUM_OPTIONS = 40  # METIS_NOPTIONS
_OK = 1  # METIS_OK


class AdjacencyLists(NamedTuple):
    """A symmetric graph without self-loops and parallel edges, on which METIS would write beyond its buffers."""

    indptr: Array  # (N + 1,) `METIS_INTEGER`, as are the others; node v has neighbours[indptr[v] : indptr[v + 1]]
    neighbours: Array  # (E,)
    weights: Array | None = None  # (E,) from 1 on; None if all are 1


def metis_parts(
    lists: AdjacencyLists, node_weights: Array, num_parts: int, *, imbalance: float, seed: int, trials: int = 1
) -> Array:
    """The part of every node, (N,) `METIS_INTEGER`: parts with few edges between them and about equal sums of weights.

    Args:
        lists: N nodes and at least one edge.
        node_weights: (N, K) integers from 0 on.
        num_parts: at least 2.
        imbalance: how much larger than the mean a part may be, by each weight; 0.05 is 5 %.
        trials: of which the one with the smallest cut counts.
    """
    library = ctypes.CDLL(pymetis._internal.__file__)
    options = np.empty(_NUM_OPTIONS, METIS_INTEGER)
    library.METIS_SetDefaultOptions(options.ctypes)
    keys: Any = pymetis._internal.options_indices  # type: ignore[attr-defined]
    options[int(keys.SEED)] = seed % (np.iinfo(np.int32).max - 1) + 1  # srand(0) of glibc is srand(1)
    options[int(keys.NCUTS)] = trials
    node_weights = np.ascontiguousarray(node_weights, METIS_INTEGER)
    num_nodes, num_weights = node_weights.shape
    limits = np.full(num_weights, 1 + imbalance, np.float32)
    part_of = np.empty(num_nodes, METIS_INTEGER)
    status = library.METIS_PartGraphKway(
        _number(num_nodes),
        _number(num_weights),
        lists.indptr.ctypes,
        lists.neighbours.ctypes,
        node_weights.ctypes,
        None,  # sizes of nodes
        None if lists.weights is None else lists.weights.ctypes,
        _number(num_parts),
        None,  # shares of the parts: equal
        limits.ctypes,
        options.ctypes,
        _number(0),  # becomes the cut
        part_of.ctypes,
    )
    if status != _OK:
        raise PartitionError(f"METIS finds no {num_parts} parts of this graph (status {status}); try another number.")
    return part_of


def _number(value: int) -> Any:
    """A pointer to an integer of METIS."""
    return np.array(value, METIS_INTEGER).ctypes
