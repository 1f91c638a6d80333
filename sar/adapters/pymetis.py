"""METIS's C function (METIS manual 5.1.0, section 5.7) in the library that the package `pymetis` brings.

The package's own function takes one weight for each node; balancing several quantities needs several.
"""

import ctypes
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sar.errors import ConfigError, PartitionError

Array = NDArray[Any]

_NUM_OPTIONS = 40  # METIS_NOPTIONS
_OK = 1  # METIS_OK


def has_pymetis() -> bool:
    """Whether the package is installed."""
    return find_spec("pymetis") is not None


def metis_dtype() -> Any:
    """The integers of the installed METIS."""
    from pymetis import zero_copy_dtype

    return zero_copy_dtype()


def part_graph_kway(
    indptr: Array,
    neighbours: Array,
    edge_weights: Array,
    weights: Array,
    num_parts: int,
    imbalance: float,
    seed: int,
    trials: int,
) -> Array:
    """The part of every node, (N,), all integers being of `metis_dtype()`.

    Args:
        indptr, neighbours: (N + 1,) and (E,), a symmetric graph with edges.
        edge_weights: (E,), at least 1; or (0,) where all are 1.
        weights: (N, K) of the nodes.
        num_parts: P, at least 2.
        imbalance: how much larger than the mean a part may be, by each weight.
        seed: of METIS.
        trials: of which the one with the smallest cut counts.

    Raises:
        ConfigError: the installed pymetis does not let METIS be called.
        PartitionError: METIS finds no parts.
    """
    internal: Any = import_module("pymetis._internal")
    try:
        library = ctypes.CDLL(internal.__file__)
        partition, set_defaults = library.METIS_PartGraphKway, library.METIS_SetDefaultOptions
    except (OSError, AttributeError) as error:
        raise ConfigError(f"METIS cannot be called in this build of pymetis ({error}); use method 'metis'.") from error

    def pointer(array: Array) -> Any:
        return ctypes.c_void_p(array.ctypes.data) if array.size else None

    dtype = metis_dtype()
    options, part_of = np.empty(_NUM_OPTIONS, dtype), np.empty(len(indptr) - 1, dtype)
    set_defaults(pointer(options))
    options[int(internal.options_indices.SEED)] = seed % (np.iinfo(np.int32).max - 1) + 1  # glibc: srand(0) is srand(1)
    options[int(internal.options_indices.NCUTS)] = trials
    sizes = [np.array([size], dtype) for size in (len(part_of), weights.shape[1], num_parts, 0)]
    nodes, constraints, parts, cut = (pointer(size) for size in sizes)
    limits = np.full(weights.shape[1], 1 + imbalance, np.float32)
    graph = pointer(indptr), pointer(neighbours), pointer(weights), None, pointer(edge_weights)
    wanted = parts, None, pointer(limits), pointer(options)
    status = partition(nodes, constraints, *graph, *wanted, cut, pointer(part_of))
    if status != _OK:
        raise PartitionError(f"METIS finds no {num_parts} parts of this graph (status {status}); try another number.")
    return part_of
