"""Linear deterministic greedy assignment, restreamed over neighbour lists on disk.

Stanton and Kliot, "Streaming graph partitioning for large distributed graphs", KDD 2012; restreaming: Nishimura and
Ugander, "Restreaming graph partitioning", KDD 2013.
"""

from collections.abc import Callable

import numpy as np

from sar.kernels._numba import inline, kernel
from sar.partition.assignment import AssignmentTask
from sar.partition.external_csr import ExternalCsr
from sar.partition.graph_data import Array
from sar.partition.methods.balance import rebalance

PASSES = 10
SETTLED = 0.001
"""Share of the nodes: passes end when fewer change their part."""
READING = 0.4
"""Share of the work that is making the neighbour lists."""


def ldg(task: AssignmentTask) -> Array:
    """Give each node the part with most of its neighbours, weighted by the room that is left, again and again.

    In order of their IDs, node v goes to the part p that maximises |neighbours of v in p| (1 - load of p / capacity).
    A neighbour counts where it is put in this pass, else where it was put in the one before; loads start anew in every
    pass. Ties go to the emptier part, then by a hash of the seed. With several balances, load / capacity is the greatest
    of them. Ten passes, or fewer if hardly a node moves any more.

    Memory: about 24 bytes a node, 4 more for each weight, and 20 MB. Disk: as `ExternalCsr`.
    """
    csr = ExternalCsr.of_graph(
        task.graph, task.scratch / "neighbours", progress=lambda share: task.progress("neighbour lists", READING * share)
    )
    part_of = np.full(csr.num_nodes, -1, np.int32)
    restream(
        csr, relative_weights(task), part_of, task.num_parts, task.seed, lambda share: _tell(task, "streaming", share)
    )
    return rebalance(part_of, task.num_parts, task.weights, task.imbalance, task.seed)


def _tell(task: AssignmentTask, doing: str, share: float) -> None:
    task.progress(doing, READING + (1 - READING) * share)


def relative_weights(task: AssignmentTask) -> Array:  # (N, K) float32
    """What has to be balanced, 1 and then the weights of each node, in units of what one part may have of it.

    A part may have (1 + imbalance) times the mean; also the least that allows whole nodes to be divided.
    """
    ones = np.ones(task.graph.total_nodes, np.int8)
    columns = [np.asarray(column) for column in (ones, *task.weights.values())]
    columns = [column for column in columns if column.any()] or [ones]
    relative = np.empty((len(ones), len(columns)), np.float32)
    for k, column in enumerate(columns):
        mean, least = column.sum(dtype=np.float64) / task.num_parts, column[column > 0].min(initial=1)
        limit = max((1 + task.imbalance) * mean, np.ceil(mean / least) * least, float(column.max(initial=1)))
        np.divide(column, limit, out=relative[:, k], casting="unsafe")
    return relative


def restream(
    csr: ExternalCsr,
    weights: Array,
    part_of: Array,
    num_parts: int,
    seed: int,
    progress: Callable[[float], None],
) -> None:
    """Passes of linear deterministic greedy over `part_of`, in place.

    Args:
        csr: neighbour lists.
        weights: (N, K) of the nodes, in units of the capacity.
        part_of: (N,) int32; -1: not put anywhere yet.
        num_parts: P.
        seed: of ties.
        progress: called with the share that is done.
    """
    counts, touched = np.zeros(num_parts), np.empty(num_parts, np.int64)
    for i in range(PASSES):
        loads, moved = np.zeros((num_parts, weights.shape[1])), 0
        for window in csr.windows():
            bounds = csr.indptr[window.first : window.last + 1]
            moved += _ldg_pass(
                window.first, bounds, window.neighbours, weights, part_of, loads, counts, touched, np.uint64(seed)
            )
            progress((i + window.last / csr.num_nodes) / PASSES)
        if moved <= SETTLED * csr.num_nodes:
            break


@inline
def fullness(loads: Array, part: int, weights: Array, v: int) -> float:
    """The greatest load of a part relative to its capacity; 2 where node v does not fit in."""
    fullest = 0.0
    for k in range(weights.shape[1]):
        load = loads[part, k]
        fullest = max(fullest, load if load + weights[v, k] <= 1.0 + 1e-6 else 2.0)
    return fullest


@inline
def add_load(loads: Array, part: int, weights: Array, v: int, sign: float) -> None:
    """Add the weights of node v, times `sign`, to the load of a part."""
    for k in range(weights.shape[1]):
        loads[part, k] += sign * weights[v, k]


@inline
def draw(seed: int, v: int, choice: int) -> int:
    """A random number, uint64, for node v and one of its choices (SplitMix64, Steele et al., 2014)."""
    x = seed + np.uint64(v) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(choice) * np.uint64(0xD1B54A32D192ED03)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@inline
def emptiest(loads: Array, weights: Array, v: int, seed: int) -> int:
    """The part with most room; where node v fits in nowhere, the one that is least full."""
    best, best_fill = 0, np.inf
    for part in range(loads.shape[0]):
        fill = fullness(loads, part, weights, v)
        if fill >= 2.0:
            for k in range(weights.shape[1]):
                fill = max(fill, 2.0 + loads[part, k])
        if fill < best_fill or (fill == best_fill and draw(seed, v, part) > draw(seed, v, best)):
            best, best_fill = part, fill
    return best


@kernel
def _ldg_pass(
    first: int,
    bounds: Array,
    neighbours: Array,
    weights: Array,
    part_of: Array,
    loads: Array,
    counts: Array,
    touched: Array,
    seed: int,
) -> int:
    """Put the nodes of a window; returns how many come to another part than they were in. counts is 0 before and after."""
    moved = 0
    for v in range(first, first + bounds.size - 1):
        num_touched = 0
        for e in range(bounds[v - first] - bounds[0], bounds[v - first + 1] - bounds[0]):
            part = part_of[neighbours[e]]
            if part >= 0:
                if counts[part] == 0:
                    touched[num_touched] = part
                    num_touched += 1
                counts[part] += 1
        best, best_score, best_fill = -1, 0.0, 0.0
        for i in range(num_touched):
            part = touched[i]
            fill = fullness(loads, part, weights, v)
            score = counts[part] * (1.0 - fill)
            counts[part] = 0
            if score < best_score or fill >= 2.0:
                continue
            if score == best_score and best >= 0:
                if fill > best_fill or (fill == best_fill and draw(seed, v, part) < draw(seed, v, best)):
                    continue
            best, best_score, best_fill = part, score, fill
        if best < 0:
            best = emptiest(loads, weights, v, seed)
        add_load(loads, best, weights, v, 1.0)
        moved += part_of[v] != best
        part_of[v] = best
    return moved
