"""The last step of a method: moves nodes until all parts are within the limits of the task."""

import numpy as np

from sar.data.arrays import Array
from sar.logging_setup import logger
from sar.partition.assign.task import (
    AssignmentTask,
    Constraints,
    add_load,
    compiled,
    edge_chunks,
    part_loads,
    part_means,
)
from sar.partition.graph_source import index_dtype

_PASSES = 20
_SMALLEST_GAIN = 1e-12
_CANDIDATES = 64
"""Exchange candidates considered for each node."""


def rebalance(task: AssignmentTask, part_of: Array) -> Array:
    """Return parts within the task's limits if possible: `move_nodes`, with one more pass over the edges.

    If a part is too large, the pass counts the edges of each node within its part, to move nodes that add few cut
    edges. `part_of`, (N,), is not changed; it is returned if no part is too large.
    """
    constraints = task.constraints()
    if (part_loads(part_of, task.num_parts, constraints) <= constraints.limits).all():
        return part_of
    within = np.zeros(len(part_of), index_dtype(2 * task.graph.total_edges))
    for src, dst in edge_chunks(task, "balancing parts"):
        _count_within(src, dst, part_of, within)
    return move_nodes(task, part_of, attachment=within)


def move_nodes(task: AssignmentTask, part_of: Array, attachment: Array | None = None) -> Array:
    """Move nodes out of overloaded parts until every constraint holds or no move helps.

    A move must lower the excess, which is the sum, over parts and constraints, of the load above the limit relative to
    the limit. To move few nodes, the heaviest move first, but none heavier than the excess; with `attachment`, (N,),
    the cost of moving each node, those with the least cost per load move first. If no single move helps, nodes are
    exchanged. A warning is logged for limits that cannot be met, for example because of one heavy node.
    `part_of`, (N,), is not changed; it is returned if no part is too large.
    """
    constraints = task.constraints()
    loads = part_loads(part_of, task.num_parts, constraints)
    rng = np.random.default_rng(task.seed)
    moved = part_of
    for attempt in range(_PASSES):
        if not (loads > constraints.limits).any():
            return moved
        careful = attempt == 0
        if careful:
            moved = part_of.copy()
        order = _who_moves_first(moved, loads, constraints, attachment, rng, careful)
        helped = _relieve(order, moved, constraints, loads, careful)
        if not careful and helped <= len(order) // 100:
            helped += _exchange(order, rng.permutation(len(moved)), moved, constraints, loads)
            if not helped:
                break
    means = part_means(constraints.weights, task.num_parts)
    for name, load, mean, limit in zip(["nodes", *task.weights], loads.T, means, constraints.limits, strict=True):
        if load.max() > limit:
            logger.warning(
                "part %d holds %g of '%s', %.3f times the mean; at most %.3f times was asked for, and moving nodes "
                "could not reach that.",
                int(load.argmax()),
                load.max(),
                name,
                load.max() / mean,
                1 + task.imbalance,
            )
    return moved


def _who_moves_first(
    part_of: Array,
    loads: Array,
    constraints: Constraints,
    attachment: Array | None,
    rng: np.random.Generator,
    careful: bool,
) -> Array:
    """Nodes whose removal relieves overloaded parts, in the order in which to try them."""
    over = loads > constraints.limits
    nodes = rng.permutation(np.flatnonzero(np.logical_or.reduce(over, axis=1)[part_of]))
    relief = np.zeros(len(nodes))
    for k in np.flatnonzero(np.logical_or.reduce(over)):
        relief += over[part_of[nodes], k] * constraints.weights[nodes, k] / constraints.limits[k]
    nodes, relief = nodes[relief > 0], relief[relief > 0]
    by_weight = -relief if careful else relief
    first = by_weight if attachment is None else attachment[nodes] / relief
    in_order: Array = nodes[np.argsort(first, kind="stable")]
    return in_order


@compiled
def _count_within(src: Array, dst: Array, part_of: Array, within: Array) -> None:
    for i in range(len(src)):
        u, v = src[i], dst[i]
        if u != v and part_of[u] == part_of[v]:
            within[u] += 1
            within[v] += 1


@compiled
def _relieve(order: Array, part_of: Array, constraints: Constraints, loads: Array, careful: bool) -> int:
    """Move nodes to the parts that lower the excess most; `careful` skips nodes heavier than it. Return how many."""
    num_moved = 0
    for node in order:
        here = part_of[node]
        gain, fits = 0.0, True
        for k in range(constraints.limits.size):
            over = loads[here, k] - constraints.limits[k]
            weight = constraints.weights[node, k]
            if over > 0 and weight > 0:
                gain += min(over, weight) / constraints.limits[k]
                fits = fits and weight <= over
        if gain <= _SMALLEST_GAIN or (careful and not fits):
            continue
        there, cost = _best_place(node, here, constraints, loads)
        if there >= 0 and gain - cost > _SMALLEST_GAIN:
            _move(node, there, part_of, constraints, loads)
            num_moved += 1
    return num_moved


@compiled
def _move(node: int, there: int, part_of: Array, constraints: Constraints, loads: Array) -> None:
    add_load(constraints, loads, node, part_of[node], -1.0)
    add_load(constraints, loads, node, there, 1.0)
    part_of[node] = there


@compiled
def _best_place(node: int, here: int, constraints: Constraints, loads: Array) -> tuple[int, float]:
    """The part to which a node adds the least excess (ties: most free capacity), and the added excess."""
    place, least, lowest = -1, np.inf, np.inf
    for part in range(len(loads)):
        if part == here:
            continue
        cost, level = 0.0, 0.0
        for k in range(constraints.limits.size):
            limit = constraints.limits[k]
            if limit > 0:
                after = loads[part, k] + constraints.weights[node, k]
                cost += _excess(after, limit) - _excess(loads[part, k], limit)
                level = max(level, after / limit)
        if cost < least or (cost == least and level < lowest):
            place, least, lowest = part, cost, level
    return place, least


@compiled
def _excess(load: float, limit: float) -> float:
    return max(0.0, load - limit) / limit


@compiled
def _exchange(order: Array, partners: Array, part_of: Array, constraints: Constraints, loads: Array) -> int:
    """Exchange nodes of overloaded parts with other nodes, considering `_CANDIDATES` for each."""
    num_changes, position = 0, 0
    for node in order:
        here = part_of[node]
        if not (loads[here] > constraints.limits).any():
            continue
        for _ in range(_CANDIDATES):
            partner = partners[position]
            position = (position + 1) % len(partners)
            there = part_of[partner]
            if there != here and _change_of_excess(node, partner, part_of, constraints, loads) < -_SMALLEST_GAIN:
                _move(node, there, part_of, constraints, loads)
                _move(partner, here, part_of, constraints, loads)
                num_changes += 1
                break
    return num_changes


@compiled
def _change_of_excess(node: int, partner: int, part_of: Array, constraints: Constraints, loads: Array) -> float:
    """The change of the excess if two nodes are exchanged."""
    change = 0.0
    for k in range(constraints.limits.size):
        limit = constraints.limits[k]
        if limit > 0:
            goes = float(constraints.weights[node, k]) - constraints.weights[partner, k]
            here, there = loads[part_of[node], k], loads[part_of[partner], k]
            change += _excess(here - goes, limit) - _excess(here, limit)
            change += _excess(there + goes, limit) - _excess(there, limit)
    return change
