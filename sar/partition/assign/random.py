"""The method `random`: nodes at random, in equal numbers."""

import numpy as np

from sar.data.arrays import Array
from sar.partition.assign.rebalance import move_nodes
from sar.partition.assign.task import AssignmentTask, compiled, part_means


def random(task: AssignmentTask) -> Array:
    """Assign nodes at random; parts differ by one node at most.

    Nodes in random order are assigned in rounds, one to each part. If there are weights, nodes of like weights are
    next to each other in that order, and a round gives its heaviest node to the part that holds least; so every weight
    is spread as evenly as its largest values allow. Only if that breaks a constraint, nodes are moved (`move_nodes`).
    Edges are not read.
    """
    num_nodes, num_parts = task.graph.total_nodes, task.num_parts
    weights = task.constraints().weights[:, 1:]
    rng = np.random.default_rng(task.seed)
    order = rng.permutation(num_nodes)
    part_of = np.empty(num_nodes, np.int32)
    if weights.shape[1]:
        kinds = np.argsort([len(np.unique(weight)) for weight in weights.T], kind="stable")
        # The last key counts first: the weight with the fewest values, such as a mask, makes the coarsest groups.
        order = order[np.lexsort([-weights[order, kind] for kind in kinds[::-1]])]
        _assign_rounds(order, weights / np.maximum(part_means(weights, num_parts), 1e-30), num_parts, part_of)
    else:
        part_of[order] = np.arange(num_nodes) % num_parts
    task.progress("assigning nodes", 1.0)
    return move_nodes(task, part_of)


@compiled
def _assign_rounds(order: Array, weights: Array, num_parts: int, part_of: Array) -> None:
    """Give each part one of every `num_parts` nodes, the heaviest to the part that holds least in all weights."""
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
