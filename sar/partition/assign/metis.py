"""METIS (Karypis and Kumar, 1998) on neighbour lists on disk, for graphs that are small enough or made so."""

import numpy as np

from sar.data.arrays import Array
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
from sar.partition.metis_library import METIS_INTEGER, AdjacencyLists, metis_parts

MOST = 2**30
"""Greatest sum of integer weights; METIS may add them up in 32 bits."""


WHOLE = 1 / 32
"""Components of at most this share of a part are not divided."""


def divide(csr: ExternalCsr, weights: Array, task: AssignmentTask, most_entries: int, trials: int = 1) -> Array:
    """The part of each node by METIS, (N,) int32.

    `weights`, (N, K), are in units of the capacity of a part. METIS is given about `most_entries` if there are more. Of
    several trials the best counts. Small components and nodes without edges are dealt out last, whole: METIS takes
    time quadratic in their number.
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
    if np.count_nonzero(divided) <= task.num_parts:  # METIS takes no such graph
        divided[:] = False
    part_of, loads = np.zeros(csr.num_nodes, np.int32), np.zeros((task.num_parts, weights.shape[1]))
    if divided.any():
        lists, own = _sublists(lists, divided), weights[divided]
        own = own[:, own.any(axis=0)]
        whole_numbers = np.rint(own * (MOST / own.sum(axis=0, dtype=np.float64)))
        part_of[divided] = metis_parts(
            lists, whole_numbers, task.num_parts, imbalance=task.imbalance, seed=task.seed, trials=trials
        )
        loads = part_loads(part_of[divided], task.num_parts, within_capacity(weights[divided]))
    left = np.flatnonzero(~divided & (component == np.arange(csr.num_nodes)))
    sizes = _sums(weights, component)[left]
    largest_first = np.argsort(-sizes.max(axis=1), kind="stable")
    part_of[left[largest_first]] = list_schedule(sizes[largest_first], np.ones(weights.shape[1]), loads)
    return part_of[component]


def _sums(weights: Array, component: Array) -> Array:
    """The weights of each component, (N, K), at the number of its first node."""
    return np.stack([np.bincount(component, weight, len(component)) for weight in weights.T], axis=1)


@compiled
def _join_neighbours(indptr: Array, neighbours: Array, component: Array) -> None:
    """Set the component of each node, (N,), which is its own number before, to the first node of it."""
    for v in range(component.size):
        for e in range(indptr[v], indptr[v + 1]):
            one, other = root(component, v), root(component, neighbours[e])
            component[max(one, other)] = min(one, other)
    follow(component)


def _sublists(lists: AdjacencyLists, nodes: Array) -> AdjacencyLists:
    """The lists of some nodes, (N,) bool, which have all their neighbours among them."""
    degrees, place = np.diff(lists.indptr), (np.cumsum(nodes) - 1).astype(METIS_INTEGER)
    entries = np.repeat(nodes, degrees)
    indptr = np.concatenate([[0], np.cumsum(degrees[nodes])], dtype=METIS_INTEGER)
    assert lists.weights is not None
    return AdjacencyLists(indptr, place[lists.neighbours[entries]], lists.weights[entries])


def _adjacency_lists(csr: ExternalCsr, unit: float, seed: int) -> AdjacencyLists:
    """Load lists, weights in units of `unit` and rounded at random, so that the cut of any parts is right on average.

    Both directions of an edge are rounded alike, and dropped if nothing is left. Parallel edges are merged.
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
    """Round the weights of a window to whole units, up or down by chance, alike for both directions.

    Set indptr[v + 1] to the number of entries of node v that are left.
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
