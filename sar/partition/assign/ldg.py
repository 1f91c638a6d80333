"""Linear deterministic greedy assignment, restreamed over neighbour lists on disk.

Stanton and Kliot, "Streaming graph partitioning for large distributed graphs", KDD 2012; restreaming: Nishimura and
Ugander, "Restreaming graph partitioning", KDD 2013.
"""

import numpy as np

from sar.partition.assign.assignment import AssignmentTask
from sar.partition.assign.balance import constraints
from sar.partition.assign.compiled import compiled
from sar.partition.assign.external_csr import ExternalCsr
from sar.partition.assign.settle import settle
from sar.partition.graph_data import Array

PASSES = 10
SETTLED = 0.001
"""Share of the nodes: passes end when fewer change their part."""
READING = 0.4
"""Share of the work that is making the neighbour lists."""
FULL = 2.0
"""In place of how full a part is: that a node does not fit in."""


def ldg(task: AssignmentTask) -> Array:
    """Give each node the part with most of its neighbours, weighted by the room that is left, again and again.

    In order of their IDs, node v goes to the part p that maximises |neighbours of v in p| (1 - load of p / capacity).
    A neighbour counts where it is put in this pass, else where it was put in the one before; loads start anew in every
    pass. Ties go to the emptier part, then by a hash of the seed. With several balances, load / capacity is the
    greatest of them. Ten passes, or fewer if hardly a node moves any more.

    Memory: about 24 bytes a node, 4 more for each weight, and 20 MB. Disk: as `ExternalCsr`.
    """
    csr = lists_on_disk(task)
    part_of = np.full(csr.num_nodes, -1, np.int32)
    greedy_passes(csr, relative_weights(task), part_of, task)
    return settle(task, part_of)


def lists_on_disk(task: AssignmentTask) -> ExternalCsr:
    """The task's graph as neighbour lists in its scratch directory; the first `READING` of a method's work."""
    return ExternalCsr.of_graph(
        task.graph, task.scratch / "lists", progress=lambda share: task.progress("neighbour lists", READING * share)
    )


def relative_weights(task: AssignmentTask) -> Array:  # (N, K) float32
    """What has to be balanced, 1 and then the weights of each node, in units of what one part may have of it."""
    rules = constraints(task.graph.total_nodes, task.num_parts, task.weights, task.imbalance)
    there = [k for k, mean in enumerate(rules.means) if mean > 0]
    relative = np.empty((task.graph.total_nodes, len(there)), np.float32)
    for column, k in zip(relative.T, there, strict=True):
        np.divide(rules.weights[k - 1] if k else 1, rules.limits[k], out=column, casting="same_kind")
    return relative


def greedy_passes(csr: ExternalCsr, weights: Array, part_of: Array, task: AssignmentTask) -> None:
    """Passes of linear deterministic greedy, in place.

    Args:
        csr: neighbour lists.
        weights: (N, K) of the nodes, in units of the capacity of a part.
        part_of: (N,) int32; -1: not put anywhere yet.
        task: what is asked for.
    """
    counts, touched = np.zeros(task.num_parts), np.empty(task.num_parts, np.int64)
    for i in range(PASSES):
        loads, moved = np.zeros((task.num_parts, weights.shape[1])), 0
        for window in csr.windows():
            moved += _greedy_pass(*window, weights, part_of, loads, counts, touched, np.uint64(task.seed))
            done = (i + window.last / csr.num_nodes) / PASSES
            task.progress("greedy passes", READING + (1 - READING) * done)
        if moved <= SETTLED * csr.num_nodes:
            break


@compiled
def fullness(loads: Array, part: int, weights: Array, v: int) -> float:
    """The greatest load of a part relative to its capacity, 0 to 1; `FULL` where node v does not fit in."""
    fullest: float = 0.0
    for k in range(weights.shape[1]):
        if weights[v, k] > 0 and loads[part, k] + weights[v, k] > 1.0 + 1e-6:
            return FULL
        fullest = max(fullest, min(loads[part, k], 1.0))
    return fullest


@compiled
def add_load(loads: Array, part: int, weights: Array, v: int, sign: float) -> None:
    """Add the weights of node v, times `sign`, to the load of a part."""
    for k in range(weights.shape[1]):
        loads[part, k] += sign * weights[v, k]


@compiled
def draw(seed: int, v: int, choice: int) -> int:
    """A random number, uint64, for node v and one of its choices (SplitMix64, Steele et al., 2014)."""
    x = seed + np.uint64(v) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(choice) * np.uint64(0xD1B54A32D192ED03)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: int = x ^ (x >> np.uint64(31))
    return mixed


@compiled
def emptiest(loads: Array, weights: Array, v: int, seed: int) -> int:
    """The part with most room; where node v fits in nowhere, the one that is least full."""
    best, best_fill = 0, np.inf
    for part in range(loads.shape[0]):
        fill = fullness(loads, part, weights, v)
        if fill >= FULL:
            for k in range(weights.shape[1]):
                fill = max(fill, FULL + loads[part, k])
        if fill < best_fill or (fill == best_fill and draw(seed, v, part) > draw(seed, v, best)):
            best, best_fill = part, fill
    return best


@compiled
def add_up(
    place: int, bounds: Array, neighbours: Array, edge_weights: Array | None, label: Array, tally: Array, touched: Array
) -> int:
    """Sum the weights of a node's edges by the neighbours' labels, leaving out neighbours of label -1.

    Args:
        place: of the node in its window.
        bounds, neighbours, edge_weights: as in `Window`.
        label: (N,) integers.
        tally: a sum for each label, 0 where it is not in use.
        touched: is filled with the labels that are there.

    Returns:
        How many labels there are.
    """
    count = 0
    for e in range(bounds[place] - bounds[0], bounds[place + 1] - bounds[0]):
        one = label[neighbours[e]]
        if one >= 0:
            if tally[one] == 0:
                touched[count] = one
                count += 1
            tally[one] += 1 if edge_weights is None else edge_weights[e]
    return count


@compiled
def _greedy_pass(
    first: int,
    bounds: Array,
    neighbours: Array,
    edge_weights: Array | None,
    weights: Array,
    part_of: Array,
    loads: Array,
    counts: Array,
    touched: Array,
    seed: int,
) -> int:
    """Put the nodes of a window; returns how many come to another part than before. counts is 0 before and after."""
    moved = 0
    for v in range(first, first + bounds.size - 1):
        num_touched = add_up(v - first, bounds, neighbours, edge_weights, part_of, counts, touched)
        best, best_score, best_fill = -1, 0.0, 0.0
        for i in range(num_touched):
            part = touched[i]
            fill = fullness(loads, part, weights, v)
            score = counts[part] * (1.0 - fill)
            counts[part] = 0
            if fill < FULL and (
                score > best_score
                or best < 0
                or (score == best_score and fill < best_fill)
                or (score == best_score and fill == best_fill and draw(seed, v, part) > draw(seed, v, best))
            ):
                best, best_score, best_fill = part, score, fill
        if best < 0:
            best = emptiest(loads, weights, v, seed)
        add_load(loads, best, weights, v, 1.0)
        moved += part_of[v] != best
        part_of[v] = best
    return moved
