"""Semi-external multilevel assignment: node arrays in memory, neighbour lists on disk.

Meyerhenke, Sanders and Schulz, "Partitioning complex networks via size-constrained clustering", SEA 2014.
"""

from typing import NamedTuple

import numpy as np

from sar.partition.assignment import AssignmentTask
from sar.partition.external_csr import ExternalCsr
from sar.partition.graph_data import Array
from sar.partition.methods.balance import rebalance
from sar.partition.methods.label_propagation import cluster, refine
from sar.partition.methods.ldg import READING, greedy_passes, lists_on_disk, relative_weights
from sar.partition.methods.metis import divide
from sar.partition.methods.metis_library import has_pymetis

COARSE_ENTRIES = 1 << 21
"""Neighbour lists of so many entries are given to METIS."""
CLUSTER = 1 / 16
"""The most that a cluster may have of what a part may have."""
CLUSTER_PASSES = 5
REFINE_PASSES = 8


class Level(NamedTuple):
    """A graph, from the given one to the coarsest.

    csr: its neighbour lists.
    weights: (N, K) of its nodes, in units of the capacity of a part.
    """

    csr: ExternalCsr
    weights: Array


def multilevel(task: AssignmentTask) -> Array:
    """Contract clusters until METIS takes little memory, and take its parts back to the nodes, refining them.

    Clusters come from label propagation with limited sizes. The coarsest graph is divided by METIS (pymetis where it is
    installed, else DGL's); where clusters do not get it small enough, by METIS on edges drawn at random. On every level
    label propagation between the parts, within their capacities, lowers the cut.
    """
    levels, clusters = [Level(lists_on_disk(task), relative_weights(task))], []
    if task.num_parts == 1 or levels[0].csr.num_entries == 0:
        part_of = np.full(levels[0].csr.num_nodes, -1, np.int32)
        greedy_passes(*levels[0], part_of, task)
        return rebalance(part_of, task.num_parts, task.weights, task.imbalance, task.seed)
    limit = COARSE_ENTRIES
    while levels[-1].csr.num_entries > limit:
        csr, weights = levels[-1]
        label, count = cluster(csr, weights, CLUSTER, CLUSTER_PASSES, task.seed, lambda share: None)
        if count > 0.9 * csr.num_nodes or count <= task.num_parts:
            break
        coarse = csr.contracted(label, count, task.scratch / f"lists-{len(levels)}")
        summed = [np.bincount(label, weights=column, minlength=count) for column in weights.T]
        levels.append(Level(coarse, np.stack(summed, axis=1).astype(np.float32)))
        clusters.append(label)
        print("level", count, coarse.num_entries)
    part_of = divide(*levels[-1], task, limit, in_dgl=not has_pymetis())
    while True:
        refine(*levels.pop(), part_of, task.num_parts, REFINE_PASSES, task.seed, lambda share: None)
        if not levels:
            return rebalance(part_of, task.num_parts, task.weights, task.imbalance, task.seed)
        part_of = part_of[clusters.pop()]
