"""METIS (Karypis and Kumar, 1998) on neighbor lists from disk, for small or contracted graphs.

The package `pymetis` contains the library. Its `part_graph` only balances one weight: of an (N, K) array it silently
uses the first N numbers (version 2025.2.2). With the mean of K weights, the cut of a graph with two weakly connected
node types is twice as large. So we call METIS's C function (manual 5.1.0, section 5.7), which balances K weights.
"""

import ctypes
from typing import Any, NamedTuple

import numpy as np
import pymetis
import pymetis._internal

from sar.data.arrays import Array
from sar.errors import PartitionError
from sar.partition.assign.external_csr import ExternalCsr, Window, list_of
from sar.partition.assign.task import (
    AssignmentTask,
    compiled,
    draw,
    follow,
    list_schedule,
    part_loads,
    part_means,
    root,
    within_capacity,
)

METIS_INTEGER: Any = pymetis.zero_copy_dtype()  # the integers of the installed METIS
_NUM_OPTIONS = 40  # METIS_NOPTIONS
_OK = 1  # METIS_OK
MOST = 2**30
"""Maximum sum of integer weights, because METIS may sum them in 32 bits."""
WHOLE = 1 / 32
"""Components of at most this share of a part are not divided."""


class AdjacencyLists(NamedTuple):
    """A symmetric graph without self-loops and parallel edges, which would make METIS overflow its buffers."""

    indptr: Array  # (N + 1,); node v has neighbours[indptr[v] : indptr[v + 1]]; all arrays are `METIS_INTEGER`
    neighbours: Array  # (E,)
    weights: Array | None = None  # (E,) at least 1; None if all are 1


def metis_parts(
    lists: AdjacencyLists, node_weights: Array, num_parts: int, *, imbalance: float, seed: int, trials: int = 1
) -> Array:
    """Return the part of every node, (N,) `METIS_INTEGER`, with few edges between parts and balanced sums of weights.

    Args:
        lists: N nodes and at least one edge.
        node_weights: (N, K) non-negative integers.
        num_parts: at least 2.
        imbalance: allowed excess over the mean, by each weight; 0.05 is 5 %.
        trials: number of trials; the one with the smallest cut is returned.
    """

    def number(value: int) -> Any:
        return np.array(value, METIS_INTEGER).ctypes

    library = ctypes.CDLL(pymetis._internal.__file__)
    options = np.empty(_NUM_OPTIONS, METIS_INTEGER)
    library.METIS_SetDefaultOptions(options.ctypes)
    keys: Any = pymetis._internal.options_indices  # type: ignore[attr-defined]
    options[int(keys.SEED)] = seed % (np.iinfo(np.int32).max - 1) + 1  # srand(0) of glibc is srand(1)
    options[int(keys.NCUTS)] = trials
    node_weights = np.ascontiguousarray(node_weights, METIS_INTEGER)
    num_nodes, num_weights = node_weights.shape
    part_of = np.empty(num_nodes, METIS_INTEGER)
    status = library.METIS_PartGraphKway(
        number(num_nodes),
        number(num_weights),
        lists.indptr.ctypes,
        lists.neighbours.ctypes,
        node_weights.ctypes,
        None,  # sizes of nodes
        None if lists.weights is None else lists.weights.ctypes,
        number(num_parts),
        None,  # shares of the parts: equal
        np.full(num_weights, 1 + imbalance, np.float32).ctypes,
        options.ctypes,
        number(0),  # output: the cut
        part_of.ctypes,
    )
    if status != _OK:
        raise PartitionError(f"METIS finds no {num_parts} parts of this graph (status {status}); try another number.")
    return part_of


def divide(csr: ExternalCsr, weights: Array, task: AssignmentTask, most_entries: int, trials: int = 1) -> Array:
    """Partition with METIS; return the part of each node, (N,) int32.

    `weights`, (N, K), are in units of the capacity of a part. Larger graphs are sampled down to about `most_entries`
    entries. The best of several trials is used. Small components and isolated nodes are assigned last, as a whole,
    because METIS takes time quadratic in their number.
    """
    unit = 1.0
    if csr.num_entries > most_entries:
        weighed = sum(float(window.weights.sum(dtype=np.float64)) for window in csr.windows()) if csr.weighted else 0.0
        unit = (weighed if csr.weighted else csr.num_entries) / most_entries
    lists = _adjacency_lists(csr, unit, task.seed)
    component, connected = np.arange(csr.num_nodes), np.diff(lists.indptr) > 0
    _join_neighbours(lists.indptr, lists.neighbours, component)
    excess = _sums(weights, component) - WHOLE * part_means(weights[connected], task.num_parts)
    divided = (excess.max(axis=1) > 0)[component] & connected
    component[divided] = np.flatnonzero(divided)
    if np.count_nonzero(divided) <= task.num_parts:  # METIS does not support such graphs
        divided[:] = False
    part_of, loads = np.zeros(csr.num_nodes, np.int32), np.zeros((task.num_parts, weights.shape[1]))
    if divided.any():
        own = weights[divided]
        own = own[:, own.any(axis=0)]
        part_of[divided] = metis_parts(
            _sublists(lists, divided),
            np.rint(own * (MOST / own.sum(axis=0, dtype=np.float64))),
            task.num_parts,
            imbalance=task.imbalance,
            seed=task.seed,
            trials=trials,
        )
        loads = part_loads(part_of[divided], task.num_parts, within_capacity(weights[divided]))
    left = np.flatnonzero(~divided & (component == np.arange(csr.num_nodes)))
    sizes = _sums(weights, component)[left]
    largest_first = np.argsort(-sizes.max(axis=1), kind="stable")
    part_of[left[largest_first]] = list_schedule(sizes[largest_first], np.ones(weights.shape[1]), loads)
    return part_of[component]


def _sums(weights: Array, component: Array) -> Array:
    """The weights of each component, (N, K), at the index of its first node."""
    return np.stack([np.bincount(component, weight, len(component)) for weight in weights.T], axis=1)


@compiled
def _join_neighbours(indptr: Array, neighbours: Array, component: Array) -> None:
    """Set the component of each node, (N,), from its own index to the first node of the component."""
    for v in range(component.size):
        for e in range(indptr[v], indptr[v + 1]):
            one, other = root(component, v), root(component, neighbours[e])
            component[max(one, other)] = min(one, other)
    follow(component)


def _sublists(lists: AdjacencyLists, nodes: Array) -> AdjacencyLists:
    """The lists of some nodes, (N,) bool, whose neighbors are all among these nodes."""
    degrees, place = np.diff(lists.indptr), (np.cumsum(nodes) - 1).astype(METIS_INTEGER)
    entries = np.repeat(nodes, degrees)
    indptr = np.concatenate([[0], np.cumsum(degrees[nodes])], dtype=METIS_INTEGER)
    assert lists.weights is not None
    return AdjacencyLists(indptr, place[lists.neighbours[entries]], lists.weights[entries])


def _adjacency_lists(csr: ExternalCsr, unit: float, seed: int) -> AdjacencyLists:
    """Load lists with weights in units of `unit`, rounded at random so that the expected cut of any parts is right.

    Both directions of an edge are rounded in the same way, and dropped if they are 0. Parallel edges are merged.
    """
    indptr = np.zeros(csr.num_nodes + 1, METIS_INTEGER)
    entries = [np.empty((2, 0), METIS_INTEGER)]  # neighbours and weights
    for window in csr.windows():
        rounded = np.empty(len(window.neighbours), METIS_INTEGER)
        _round_weights(window, unit, np.uint64(seed), rounded, indptr)
        left = rounded > 0
        entries.append(np.stack([window.neighbours[left], rounded[left]], dtype=METIS_INTEGER))
    np.cumsum(indptr, out=indptr)
    neighbours, weights = np.concatenate(entries, axis=1)
    total = len(neighbours) if csr.weighted else _merge_parallel(indptr, neighbours, weights)
    return AdjacencyLists(indptr, neighbours[:total], weights[:total])


@compiled
def _round_weights(window: Window, unit: float, seed: int, rounded: Array, indptr: Array) -> None:
    """Randomly round the weights of a window up or down to whole units, equally for both directions.

    Sets indptr[v + 1] to the number of remaining entries of node v.
    """
    for v in range(window.first, window.first + window.bounds.size - 1):
        begin, end = list_of(window, v)
        for e in range(begin, end):
            weight, chance = window.weights[e] if window.weights.size else np.float32(1), 0.0
            if unit > 1.0:
                other = window.neighbours[e]
                chance = float(draw(seed, min(v, other), max(v, other)) >> np.uint64(11)) * 2.0**-53
            rounded[e] = int(weight / max(unit, 1.0) + chance)
            indptr[v + 1] += rounded[e] > 0


@compiled
def _merge_parallel(indptr: Array, neighbours: Array, weights: Array) -> int:
    """Sort lists whose weights are 1 and merge equal neighbors, in place; return how many remain."""
    at, start = 0, indptr[0]
    for v in range(indptr.size - 1):
        end, last = indptr[v + 1], -1
        for other in np.sort(neighbours[start:end]):
            if other == last:
                weights[at - 1] += 1
            else:
                neighbours[at], weights[at] = other, 1
                at += 1
                last = other
        indptr[v + 1], start = at, end
    return at
