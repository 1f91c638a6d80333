"""What parts may hold: a number of nodes, and sums of weights such as in-edges or training nodes.

Constraint 0 is the number of nodes; the others are the weights of the task, in their order. A method keeps to the
limits as it goes (`has_capacity`), or puts whole clusters where least is (`list_schedule`); `rebalance.py` moves nodes
where that was not enough.
"""

import heapq
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from sar.errors import ConfigError
from sar.partition.assign.compiled import compiled
from sar.partition.graph_data import Array

_SLACK = 1e-9  # relative, for round-off in sums of weights


class Constraints(NamedTuple):
    """What parts may hold.

    weights: (C, N) float32, the weights beside the number of nodes.
    means, limits: (1 + C,) float64: what a part holds on average, and at most.
    """

    weights: Array
    means: Array
    limits: Array


def balance_constraints(num_nodes: int, num_parts: int, weights: Mapping[str, Array], imbalance: float) -> Constraints:
    """The limits within which every part is to stay.

    A limit is (1 + imbalance) times the mean; where nodes or whole numbers are counted, at least the mean rounded up.

    Args:
        num_nodes: N.
        num_parts: P.
        weights: (N,) non-negative numbers or booleans each, by name.
        imbalance: how much larger than the mean a part may be; 0.05 is 5 %.

    Raises:
        ConfigError: a weight has another length, or is negative or not finite.
    """
    if num_parts < 1:
        raise ConfigError(f"cannot divide nodes into {num_parts} parts; expected at least 1.")
    if not 0 <= imbalance < np.inf:
        raise ConfigError(f"imbalance is {imbalance}; expected a number from 0 on: 0.05 is 5 % above the mean.")
    rows = np.empty((len(weights), num_nodes), np.float32)
    totals = [float(num_nodes)]
    whole = [True]  # whether only whole numbers are added up
    for row, (name, weight) in zip(rows, weights.items(), strict=True):
        weight = np.asarray(weight)
        if weight.shape != (num_nodes,):
            raise ConfigError(f"weight '{name}' has shape {weight.shape}; expected ({num_nodes},), a number per node.")
        bad = ~((weight >= 0) & (weight < np.inf))
        if bad.any():
            node = int(bad.argmax())
            raise ConfigError(f"weight '{name}' of node {node} is {weight[node]}; expected a number from 0 on.")
        row[:] = weight
        totals.append(float(row.sum(dtype=np.float64)))
        whole.append(weight.dtype.kind in "bui")
    means = np.array(totals) / num_parts
    limits = means * (1 + imbalance) * (1 + _SLACK)
    limits[whole] = np.maximum(np.floor(limits), np.ceil(means))[whole]
    return Constraints(rows, means, limits)


def part_loads(part_of: Array, num_parts: int, constraints: Constraints) -> Array:
    """What the parts hold, (1 + C, P) float64.

    Raises:
        ConfigError: there is a part below 0 or above P - 1.
    """
    if len(part_of) and not 0 <= part_of.min() <= part_of.max() < num_parts:
        raise ConfigError(f"parts go from {part_of.min()} to {part_of.max()}; expected 0 to {num_parts - 1}.")
    loads = np.zeros((len(constraints.limits), num_parts))
    _add_up(part_of, constraints, loads)
    return loads


def list_schedule(sizes: Array, weights: Array, means: Array, loads: Array) -> Array:
    """Give items one after the other to the part with the smallest load (Graham, 1969).

    A part's load is the largest of its loads by the constraints, each relative to its mean; of equals, the first part.

    Args:
        sizes: (M,), nodes in each item.
        weights: (C, M), the other weights of each item.
        means: (1 + C,), as in `Constraints`.
        loads: (1 + C, P), what the parts hold already; what they get is added.

    Returns:
        The part of each item, (M,) int32.
    """
    parts = np.empty(len(sizes), np.int32)
    scale = np.divide(1, means, out=np.zeros_like(means), where=means > 0)
    _schedule(np.ascontiguousarray(sizes), np.ascontiguousarray(weights, np.float64), scale, loads, parts)
    return parts


@compiled
def weight_of(constraints: Constraints, which: int, node: int) -> float:
    """What a node weighs in constraint `which`."""
    if which == 0:
        return 1.0
    return float(constraints.weights[which - 1, node])


@compiled
def has_capacity(constraints: Constraints, loads: Array, node: int, part: int) -> bool:
    """Whether a node can be added to a part without breaking a constraint."""
    for which in range(len(loads)):
        if loads[which, part] + weight_of(constraints, which, node) > constraints.limits[which]:
            return False
    return True


@compiled
def add_node(constraints: Constraints, loads: Array, node: int, part: int) -> None:
    """Add what a node weighs to the loads of a part."""
    for which in range(len(loads)):
        loads[which, part] += weight_of(constraints, which, node)


@compiled
def _add_up(part_of: Array, constraints: Constraints, loads: Array) -> None:
    for node in range(len(part_of)):
        add_node(constraints, loads, node, part_of[node])


@compiled
def _schedule(sizes: Array, weights: Array, scale: Array, loads: Array, parts: Array) -> None:
    num_parts = loads.shape[1]
    heap = [(_largest_load(loads, scale, part), part) for part in range(num_parts)]
    heapq.heapify(heap)
    for item in range(len(sizes)):
        part = heap[0][1]
        parts[item] = part
        loads[0, part] += sizes[item]
        for which in range(1, len(scale)):
            loads[which, part] += weights[which - 1, item]
        heapq.heapreplace(heap, (_largest_load(loads, scale, part), part))


@compiled
def _largest_load(loads: Array, scale: Array, part: int) -> float:
    most = 0.0
    for which in range(len(scale)):
        most = max(most, loads[which, part] * scale[which])
    return most
