"""METIS (Karypis and Kumar, 1998), fed from neighbour lists on disk: DGL's, or that of the package `pymetis`."""

from typing import Any, NamedTuple

import numpy as np
import torch

from sar.adapters.dgl.metis import metis_of_lists
from sar.adapters.pymetis import has_pymetis, metis_dtype, part_graph_kway
from sar.errors import ConfigError
from sar.partition.assign.assignment import AssignmentTask
from sar.partition.assign.compiled import compiled
from sar.partition.assign.external_csr import ExternalCsr
from sar.partition.assign.ldg import draw, greedy_passes, lists_on_disk, relative_weights
from sar.partition.assign.settle import settle
from sar.partition.graph_data import Array

MOST = 2**30
"""Greatest sum of integer weights; METIS adds them up in 32 bits."""


class Lists(NamedTuple):
    """Neighbour lists in memory.

    indptr, neighbours: (N + 1,) and (E,) integers.
    weights: (E,) integers, at least 1; or (0,) where all are 1.
    """

    indptr: Array
    neighbours: Array
    weights: Array


def metis(task: AssignmentTask) -> Array:
    """DGL's METIS, with one constraint for the number of nodes and one for each weight; its seed is fixed.

    Memory: about 130 bytes an edge.
    """
    return _whole_graph(task, in_dgl=True)


def pymetis(task: AssignmentTask) -> Array:
    """METIS in the package `pymetis`, with the same constraints; it takes longer than DGL's and cuts less.

    Memory: about 170 bytes an edge.

    Raises:
        ConfigError: pymetis is not installed, or the graph has too many edges for it.
    """
    if not has_pymetis():
        raise ConfigError("method 'pymetis' needs the package pymetis; `pip install pymetis`, or take 'metis', DGL's.")
    return _whole_graph(task, in_dgl=False)


def _whole_graph(task: AssignmentTask, in_dgl: bool) -> Array:
    csr, weights = lists_on_disk(task), relative_weights(task)
    if task.num_parts == 1 or csr.num_nodes <= task.num_parts or csr.num_entries == 0:
        part_of = np.full(csr.num_nodes, -1, np.int32)
        greedy_passes(csr, weights, part_of, task)  # METIS takes no such graphs
    else:
        task.progress("METIS", 0.5)
        part_of = divide(csr, weights, task, csr.num_entries, 1, in_dgl)
    return settle(task, part_of)


def divide(
    csr: ExternalCsr, weights: Array, task: AssignmentTask, most_entries: int, trials: int, in_dgl: bool
) -> Array:
    """The part of each node by METIS, (N,) int32.

    Args:
        csr: neighbour lists of N > P nodes, not all empty.
        weights: (N, K), in units of the capacity of a part.
        task: what is asked for.
        most_entries: about so many entries are given to METIS where there are more.
        trials: of which the best counts; DGL's METIS makes one.
        in_dgl: take DGL's METIS; else that of pymetis.

    Raises:
        ConfigError: there are too many edges for pymetis.
    """
    unit = _sum_of_weights(csr) / most_entries if csr.num_entries > most_entries else 1.0
    drawn = _draw_entries(csr, unit, task.seed, np.dtype(np.int64) if in_dgl else metis_dtype())
    return _in_dgl(drawn, weights, task) if in_dgl else _in_pymetis(drawn, weights, task, trials)


def _sum_of_weights(csr: ExternalCsr) -> float:
    if not csr.weighted:
        return float(csr.num_entries)
    return sum(float(window.weights.sum(dtype=np.float64)) for window in csr.windows() if window.weights is not None)


def _draw_entries(csr: ExternalCsr, unit: float, seed: int, dtype: Any) -> Lists:
    """Load lists, weights in units of `unit` and rounded at random, so that the cut of any parts is right on average.

    Both directions of an edge are rounded alike, and dropped where nothing is left.
    """
    indptr = np.zeros(csr.num_nodes + 1, np.int64)
    for window in csr.windows():
        _count_drawn(*window, unit, np.uint64(seed), indptr)
    np.cumsum(indptr, out=indptr)
    if indptr[-1] > np.iinfo(dtype).max:
        raise ConfigError(
            f"pymetis takes at most {np.iinfo(dtype).max} neighbours, this graph has {indptr[-1]}; use 'multilevel'."
        )
    neighbours = np.empty(indptr[-1], dtype)
    weights = np.empty(0 if not csr.weighted and unit <= 1 else indptr[-1], dtype)
    for window in csr.windows():
        _fill_drawn(*window, unit, np.uint64(seed), indptr, neighbours, weights)
    return Lists(indptr.astype(dtype, copy=False), neighbours, weights)


def _in_dgl(lists: Lists, weights: Array, task: AssignmentTask) -> Array:
    # It has no weights of edges, cuts many times more where edges are parallel, and needs a simple graph anyway.
    count = _merge_parallel(lists.indptr, lists.neighbours)
    lists = lists._replace(neighbours=lists.neighbours[:count])
    indptr, neighbours, whole = map(torch.from_numpy, (*lists[:2], _whole_numbers(weights, np.int64)))
    return metis_of_lists(indptr, neighbours, whole, task.num_parts).numpy().astype(np.int32)


def _in_pymetis(lists: Lists, weights: Array, task: AssignmentTask, trials: int) -> Array:
    whole = _whole_numbers(weights, metis_dtype())
    return part_graph_kway(*lists, whole, task.num_parts, task.imbalance, task.seed, trials).astype(np.int32)


def _whole_numbers(weights: Array, dtype: Any) -> Array:  # (N, K)
    whole: Array = np.rint(weights * (MOST / weights.sum(axis=0, dtype=np.float64))).astype(dtype)
    return whole


@compiled
def _rounded(edge_weights: Array | None, e: int, u: int, v: int, unit: float, seed: int) -> int:
    """The weight of entry e in whole units, by chance rounded up or down, alike for (u, v) and (v, u)."""
    weight = np.float32(1) if edge_weights is None else edge_weights[e]
    if unit <= 1.0:
        return int(weight)
    chance = float(draw(seed, min(u, v), max(u, v)) >> np.uint64(11)) * 2.0**-53
    return int(weight / unit + chance)


@compiled
def _count_drawn(
    first: int,
    bounds: Array,
    neighbours: Array,
    edge_weights: Array | None,
    unit: float,
    seed: int,
    indptr: Array,
) -> None:
    """Set indptr[v + 1] to the number of entries of the nodes v of a window."""
    for v in range(first, first + bounds.size - 1):
        for e in range(bounds[v - first] - bounds[0], bounds[v - first + 1] - bounds[0]):
            indptr[v + 1] += min(_rounded(edge_weights, e, v, neighbours[e], unit, seed), 1)


@compiled
def _fill_drawn(
    first: int,
    bounds: Array,
    neighbours: Array,
    edge_weights: Array | None,
    unit: float,
    seed: int,
    indptr: Array,
    drawn: Array,
    drawn_weights: Array,
) -> None:
    """Write the entries of the nodes of a window to where `indptr` says."""
    for v in range(first, first + bounds.size - 1):
        place = indptr[v]
        for e in range(bounds[v - first] - bounds[0], bounds[v - first + 1] - bounds[0]):
            count = _rounded(edge_weights, e, v, neighbours[e], unit, seed)
            if count:
                drawn[place] = neighbours[e]
                if drawn_weights.size:
                    drawn_weights[place] = count
                place += 1


@compiled
def _merge_parallel(indptr: Array, neighbours: Array) -> int:
    """Sort the lists and leave one of equal neighbours, in place; how many are left."""
    place, start = 0, indptr[0]
    for v in range(indptr.size - 1):
        end, last = indptr[v + 1], -1
        for other in np.sort(neighbours[start:end]):
            if other != last:
                neighbours[place] = last = other
                place += 1
        indptr[v + 1], start = place, end
    return place
