"""What still fits into parts and clusters, for methods that go over neighbour lists node by node."""

from typing import NamedTuple

import numpy as np

from sar.partition.assign.assignment import AssignmentTask
from sar.partition.assign.compiled import compiled
from sar.partition.graph_data import Array

FULL = 2.0
"""In place of how full a part is: that a node does not fit in."""


class Capacity(NamedTuple):
    """Groups of nodes, and what they hold.

    weights: (N, K) float32 of the nodes, in units of what one part may have.
    loads: (groups, K), the sums of weights of each group.
    """

    weights: Array
    loads: Array


def relative_weights(task: AssignmentTask) -> Array:  # (N, K) float32
    """What has to be balanced, 1 and then the weights of each node, in units of what one part may have of it."""
    constraints = task.constraints()
    balanced = [which for which, mean in enumerate(constraints.means) if mean > 0]
    relative = np.empty((task.graph.total_nodes, len(balanced)), np.float32)
    for column, which in zip(relative.T, balanced, strict=True):
        weight = constraints.weights[which - 1] if which else 1
        np.divide(weight, constraints.limits[which], out=column, casting="same_kind")
    return relative


@compiled
def fullness(capacity: Capacity, part: int, v: int) -> float:
    """The greatest load of a part relative to its capacity, 0 to 1; `FULL` where node v does not fit in."""
    weights, loads = capacity
    fullest: float = 0.0
    for k in range(weights.shape[1]):
        if weights[v, k] > 0 and loads[part, k] + weights[v, k] > 1.0 + 1e-6:
            return FULL
        fullest = max(fullest, min(loads[part, k], 1.0))
    return fullest


@compiled
def add_load(capacity: Capacity, group: int, v: int, sign: float) -> None:
    """Add the weights of node v, times `sign`, to the load of a group."""
    weights, loads = capacity
    for k in range(weights.shape[1]):
        loads[group, k] += sign * weights[v, k]


@compiled
def emptiest(capacity: Capacity, v: int, seed: int) -> int:
    """The part with most capacity left; where node v fits in nowhere, the one that is least full."""
    weights, loads = capacity
    best, best_fill = 0, np.inf
    for part in range(loads.shape[0]):
        fill = fullness(capacity, part, v)
        if fill >= FULL:
            for k in range(weights.shape[1]):
                fill = max(fill, FULL + loads[part, k])
        if fill < best_fill or (fill == best_fill and draw(seed, v, part) > draw(seed, v, best)):
            best, best_fill = part, fill
    return best


@compiled
def draw(seed: int, v: int, choice: int) -> int:
    """A random number, uint64, for node v and one of its choices (SplitMix64, Steele et al., 2014)."""
    x = seed + np.uint64(v) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(choice) * np.uint64(0xD1B54A32D192ED03)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: int = x ^ (x >> np.uint64(31))
    return mixed
