"""The last step of a method: parts within the limits of the task."""

import numpy as np

from sar.partition.assign.assignment import AssignmentTask
from sar.partition.assign.balance import constraints, part_loads, rebalance
from sar.partition.assign.compiled import compiled
from sar.partition.assign.stream import edge_chunks, index_dtype
from sar.partition.graph_data import Array


def settle(task: AssignmentTask, part_of: Array) -> Array:
    """Parts that keep to the task's limits where that can be: `rebalance`, with one more pass over the edges.

    The pass, made only if a part is too large, tells how many edges each node has within its part, so that nodes move
    which cut few edges by that.

    Args:
        part_of: (N,) integers from 0 to P - 1.

    Returns:
        (N,), of the same dtype; `part_of` itself where nothing is too large.
    """
    rules = constraints(len(part_of), task.num_parts, task.weights, task.imbalance)
    if (part_loads(part_of, task.num_parts, rules.weights) <= rules.limits[:, None]).all():
        return part_of
    within = np.zeros(len(part_of), index_dtype(2 * task.graph.total_edges))
    for src, dst in edge_chunks(task, "balancing parts"):
        _count_within(src, dst, part_of, within)
    return rebalance(part_of, task.num_parts, task.weights, task.imbalance, task.seed, attachment=within)


@compiled
def _count_within(src: Array, dst: Array, part_of: Array, within: Array) -> None:
    for i in range(len(src)):
        u, v = src[i], dst[i]
        if u != v and part_of[u] == part_of[v]:
            within[u] += 1
            within[v] += 1
