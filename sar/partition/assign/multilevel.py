"""The method `multilevel`, semi-external: arrays over nodes in memory, neighbour lists on disk.

Meyerhenke, Sanders and Schulz, "Partitioning complex networks via size-constrained clustering", SEA 2014.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from sar.partition.assign.assignment import AssignmentTask
from sar.partition.assign.capacity import relative_weights
from sar.partition.assign.external_csr import ExternalCsr, lists_on_disk
from sar.partition.assign.label_propagation import cluster, refine
from sar.partition.assign.ldg import READING, greedy_parts
from sar.partition.assign.metis import divide, is_trivial
from sar.partition.assign.rebalance import rebalance
from sar.partition.graph_data import Array

COARSE_ENTRIES = 1 << 20
"""Neighbours that METIS is given at most, unless memory is short."""
ENTRY_BYTES = 64
"""Memory that METIS takes for one of them, at most."""
CLUSTER = 1 / 16
"""The most that a cluster may have of what a part may have."""
SHRINKS = 0.9
"""Clusters are contracted where there are at most so many for each node."""
CLUSTER_PASSES = 5
REFINE_PASSES = 8
TRIALS = 4
"""Of METIS on the coarsest graph, of which the best counts."""
MIDDLE = 0.7
"""Share of the work until METIS."""


class Level(NamedTuple):
    """A graph, from the given one to the coarsest.

    csr: its neighbour lists.
    weights: (N, K) of its nodes, in units of the capacity of a part.
    """

    csr: ExternalCsr
    weights: Array


def multilevel(task: AssignmentTask) -> Array:
    """Contract clusters until METIS takes little memory, and take its parts back to the nodes, refining them.

    Clusters come from label propagation with limited sizes. The coarsest graph is divided by METIS; where clusters do
    not get it small enough, by METIS on edges drawn at random. On every level label propagation between the parts,
    within their capacities, lowers the cut.

    Memory: about 100 bytes a node, 16 more for each weight, and 100 MB. Disk: as `ExternalCsr`, for each level.
    """
    finest = Level(lists_on_disk(task, share=READING), relative_weights(task))
    if is_trivial(finest.csr, task):
        return rebalance(task, greedy_parts(finest.csr, finest.weights, task))
    levels = [finest]
    clusters: list[Array] = []
    while levels[-1].csr.num_entries > coarse_entries(task.memory):
        coarser = _coarser(levels[-1], task, len(levels))
        if coarser is None:
            break
        label, level = coarser
        clusters.append(label)
        levels.append(level)
    task.progress("METIS", MIDDLE)
    coarsest = levels[-1]
    part_of = divide(coarsest.csr, coarsest.weights, task, coarse_entries(task.memory), TRIALS)
    while True:
        number = len(levels)
        start, end = (MIDDLE + (1 - MIDDLE) * 0.5**halvings for halvings in (number, number - 1))
        report = _stretch(task, f"refining level {number}", start, end)
        level = levels.pop()
        refine(level.csr, level.weights, part_of, task.num_parts, REFINE_PASSES, task.seed, report)
        if not levels:
            return rebalance(task, part_of)
        part_of = part_of[clusters.pop()]


def coarse_entries(memory: int | None) -> int:
    """Neighbours that METIS is given at most where a method may use `memory` bytes."""
    return COARSE_ENTRIES if memory is None else max(1, min(COARSE_ENTRIES, memory // 2 // ENTRY_BYTES))


def _coarser(level: Level, task: AssignmentTask, number: int) -> tuple[Array, Level] | None:
    """The cluster of each node, and the graph of the clusters; None where there are too many or too few."""
    start, end = (MIDDLE - (MIDDLE - READING) * 0.5**halvings for halvings in (number - 1, number))
    report = _stretch(task, f"clustering level {number}", start, end)
    label, count = cluster(level.csr, level.weights, CLUSTER, CLUSTER_PASSES, task.seed, report)
    if count > SHRINKS * level.csr.num_nodes or count <= task.num_parts:
        return None
    csr = level.csr.contracted(label, count, task.scratch / f"lists-{number}")
    weights = np.empty((count, level.weights.shape[1]), np.float32)
    for k, column in enumerate(level.weights.T):
        weights[:, k] = np.bincount(label, weights=column, minlength=count)
    return label, Level(csr, weights)


def _stretch(task: AssignmentTask, doing: str, start: float, end: float) -> Callable[[float], None]:
    """Reports of a stretch of work, which is done from `start` to `end` when its share goes from 0 to 1."""

    def report(share: float) -> None:
        task.progress(doing, (1 - share) * start + share * end)

    return report
