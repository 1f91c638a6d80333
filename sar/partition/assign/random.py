"""The method `random`: random parts of equal size."""

import numpy as np

from sar.data.arrays import Array
from sar.partition.assign.rebalance import move_nodes
from sar.partition.assign.task import AssignmentTask, compiled, part_means


def random(task: AssignmentTask) -> Array:
    """Assign nodes at random; part sizes differ by at most one.

    Each round assigns one node of a random order to every part. With weights, nodes of similar weights are
    adjacent in this order, and a round assigns its heaviest node to the least loaded part. This spreads every weight
    as evenly as its largest values allow. If a constraint is still violated, nodes are moved (`move_nodes`).
    Edges are not read.
    """
    num_nodes, num_parts = task.graph.total_nodes, task.num_parts
    weights = task.constraints().weights[:, 1:]
    rng = np.random.default_rng(task.seed)
    order = rng.permutation(num_nodes)
    part_of = np.empty(num_nodes, np.int32)
    if weights.shape[1]:
        kinds = np.argsort([len(np.unique(weight)) for weight in weights.T], kind="stable")
        # The last key is the primary one: the weight with the fewest values, such as a mask, forms the coarsest groups.
        order = order[np.lexsort([-weights[order, kind] for kind in kinds[::-1]])]
        _assign_rounds(order, weights / np.maximum(part_means(weights, num_parts), 1e-30), num_parts, part_of)
    else:
        part_of[order] = np.arange(num_nodes) % num_parts
    task.progress("assigning nodes", 1.0)
    return move_nodes(task, part_of)


@compiled
def _assign_rounds(order: Array, weights: Array, num_parts: int, part_of: Array) -> None:
    """Assign one of every `num_parts` nodes to each part, the heaviest to the least loaded part."""
    held = np.zeros(num_parts)
    for start in range(0, len(order), num_parts):
        nodes = order[start : start + num_parts]
        weight = np.zeros(len(nodes))
        for i in range(len(nodes)):
            for k in range(weights.shape[1]):
                weight[i] += weights[nodes[i], k]
        heaviest_first = np.argsort(-weight, kind="mergesort")
        emptiest_first = np.argsort(held, kind="mergesort")
        for rank in range(len(nodes)):
            part = emptiest_first[rank]
            part_of[nodes[heaviest_first[rank]]] = part
            held[part] += weight[heaviest_first[rank]]
