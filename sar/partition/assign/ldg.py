"""The method `ldg`: linear deterministic greedy, restreamed over neighbor lists on disk.

Stanton and Kliot, "Streaming graph partitioning for large distributed graphs", KDD 2012; restreaming: Nishimura and
Ugander, "Restreaming graph partitioning", KDD 2013.
"""

import numpy as np

from sar.data.arrays import Array
from sar.partition.assign.external_csr import ExternalCsr, Tally, Window, add_up, lists_on_disk
from sar.partition.assign.rebalance import rebalance
from sar.partition.assign.task import (
    FULL,
    AssignmentTask,
    Constraints,
    add_load,
    compiled,
    draw,
    emptiest,
    fullness,
    within_capacity,
)

PASSES = 10
CONVERGED = 0.001
"""Passes end when a smaller fraction of nodes changes its part."""


def ldg(task: AssignmentTask) -> Array:
    """Repeatedly assign each node to the part with most of its neighbors, weighted by the free capacity.

    In order of IDs, node v goes to the part p that maximises |neighbors of v in p| (1 - load of p / capacity).
    A neighbor counts for its part in this pass, or else in the previous pass; loads are reset in every
    pass. Ties go to the emptier part, then by a hash of the seed. With several weights, load / capacity is the
    maximum over weights. At most ten passes; stops early when few nodes move.

    Memory: about 24 bytes per node, 4 more for each weight, and 20 MB. Disk: as `ExternalCsr`.
    """
    return rebalance(task, greedy_parts(lists_on_disk(task), task.relative_weights(), task))


def greedy_parts(csr: ExternalCsr, weights: Array, task: AssignmentTask) -> Array:
    """The part of every node, (N,) int32; weights, (N, K), are in units of the capacity of a part."""
    part_of = np.full(csr.num_nodes, -1, np.int32)
    constraints = within_capacity(weights)
    tally = Tally(np.zeros(task.num_parts), np.empty(task.num_parts + 1, np.int64))
    for i in range(PASSES):
        loads = np.zeros((task.num_parts, weights.shape[1]))
        moved = 0
        for window in csr.windows():
            moved += _greedy_pass(window, constraints, loads, part_of, tally, np.uint64(task.seed))
            task.progress("greedy passes", (i + window.last / csr.num_nodes) / PASSES)
        if moved <= CONVERGED * csr.num_nodes:
            break
    return part_of


@compiled
def _greedy_pass(
    window: Window, constraints: Constraints, loads: Array, part_of: Array, tally: Tally, seed: int
) -> int:
    """Assign the nodes of a window; return how many change their part."""
    sums, labels = tally
    moved = 0
    for v in range(window.first, window.first + window.bounds.size - 1):
        best, best_score, best_fill = -1, 0.0, 0.0
        for i in range(add_up(window, v, part_of, part_of, 0, 0, tally)):
            part = labels[i]
            fill = fullness(constraints, loads, v, part)
            score = sums[part] * (1.0 - fill)
            sums[part] = 0
            if fill < FULL and (
                score > best_score
                or best < 0
                or (score == best_score and fill < best_fill)
                or (score == best_score and fill == best_fill and draw(seed, v, part) > draw(seed, v, best))
            ):
                best, best_score, best_fill = part, score, fill
        if best < 0:
            best = emptiest(constraints, loads, v, seed)
        add_load(constraints, loads, v, best, 1.0)
        moved += part_of[v] != best
        part_of[v] = best
    return moved
