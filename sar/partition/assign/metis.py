"""METIS (Karypis and Kumar, 1998) on neighbour lists on disk, for graphs that are small enough or made so."""

import numpy as np

from sar.data.arrays import Array
from sar.partition.assign.external_csr import ExternalCsr, Window
from sar.partition.assign.task import AssignmentTask, compiled, draw
from sar.partition.metis_library import METIS_INTEGER, AdjacencyLists, metis_parts

MOST = 2**30
"""Greatest sum of integer weights; METIS may add them up in 32 bits."""


def divide(csr: ExternalCsr, weights: Array, task: AssignmentTask, most_entries: int, trials: int = 1) -> Array:
    """The part of each node by METIS, (N,) int32.

    There are N > P lists, not all empty. `weights`, (N, K), are in units of the capacity of a part. METIS is given
    about `most_entries` if there are more. Of several trials the best counts.
    """
    unit = 1.0
    if csr.num_entries > most_entries:
        weighed = sum(float(window.weights.sum(dtype=np.float64)) for window in csr.windows()) if csr.weighted else 0.0
        unit = (weighed if csr.weighted else csr.num_entries) / most_entries
    lists = _adjacency_lists(csr, unit, task.seed)
    whole_numbers = np.rint(weights * (MOST / weights.sum(axis=0, dtype=np.float64)))
    parts = metis_parts(lists, whole_numbers, task.num_parts, imbalance=task.imbalance, seed=task.seed, trials=trials)
    return parts.astype(np.int32)


def _adjacency_lists(csr: ExternalCsr, unit: float, seed: int) -> AdjacencyLists:
    """Load lists, weights in units of `unit` and rounded at random, so that the cut of any parts is right on average.

    Both directions of an edge are rounded alike, and dropped if nothing is left. Parallel edges are merged.
    """
    indptr = np.zeros(csr.num_nodes + 1, METIS_INTEGER)
    for window in csr.windows():
        _count_entries(window, unit, np.uint64(seed), indptr)
    np.cumsum(indptr, out=indptr)
    total = int(indptr[-1])
    neighbours, weights = np.empty((2, total), METIS_INTEGER)
    for window in csr.windows():
        _fill_entries(window, unit, np.uint64(seed), indptr, neighbours, weights)
    if not csr.weighted:
        total = _merge_parallel(indptr, neighbours, weights)
    return AdjacencyLists(indptr, neighbours[:total], weights[:total])


@compiled
def _rounded_weight(window: Window, e: int, v: int, unit: float, seed: int) -> int:
    """The weight of node v's entry e in whole units, by chance rounded up or down, alike for both directions."""
    weight = window.weights[e] if window.weights.size else np.float32(1)
    if unit <= 1.0:
        return int(weight)
    other = window.neighbours[e]
    chance = float(draw(seed, min(v, other), max(v, other)) >> np.uint64(11)) * 2.0**-53
    return int(weight / unit + chance)


@compiled
def _count_entries(window: Window, unit: float, seed: int, indptr: Array) -> None:
    """Set indptr[v + 1] to the number of entries that are left of the nodes v of a window."""
    bounds = window.bounds
    for place in range(bounds.size - 1):
        v = window.first + place
        for e in range(bounds[place] - bounds[0], bounds[place + 1] - bounds[0]):
            indptr[v + 1] += min(_rounded_weight(window, e, v, unit, seed), 1)


@compiled
def _fill_entries(window: Window, unit: float, seed: int, indptr: Array, neighbours: Array, weights: Array) -> None:
    """Write the entries of the nodes of a window to their places by `indptr`."""
    bounds = window.bounds
    for place in range(bounds.size - 1):
        v = window.first + place
        at = indptr[v]
        for e in range(bounds[place] - bounds[0], bounds[place + 1] - bounds[0]):
            weight = _rounded_weight(window, e, v, unit, seed)
            if weight:
                neighbours[at], weights[at] = window.neighbours[e], weight
                at += 1


@compiled
def _merge_parallel(indptr: Array, neighbours: Array, weights: Array) -> int:
    """Sort lists whose weights are 1 and merge equal neighbours, in place; how many are left."""
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
