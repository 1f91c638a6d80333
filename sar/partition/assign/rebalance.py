"""The last step of a method: nodes move until all parts are within the limits of the task."""

from collections.abc import Mapping

import numpy as np

from sar.logging_setup import logger
from sar.partition.assign.assignment import AssignmentTask
from sar.partition.assign.balance import Constraints, balance_constraints, part_loads, weight_of
from sar.partition.assign.compiled import compiled
from sar.partition.assign.stream import edge_chunks, index_dtype
from sar.partition.graph_data import Array

_PASSES = 20
_SMALLEST_GAIN = 1e-12
_CANDIDATES = 64
"""Nodes that are looked at for one that is to change places."""


def rebalance(task: AssignmentTask, part_of: Array) -> Array:
    """Parts that keep to the task's limits where that can be: `move_nodes`, with one more pass over the edges.

    The pass, made only if a part is too large, tells how many edges each node has within its part, so that nodes move
    which cut few edges by that.

    Args:
        task: what was asked for.
        part_of: (N,) integers from 0 to P - 1.

    Returns:
        (N,), of the same dtype; `part_of` itself where nothing is too large.
    """
    constraints = task.constraints()
    if (part_loads(part_of, task.num_parts, constraints) <= constraints.limits[:, None]).all():
        return part_of
    within = np.zeros(len(part_of), index_dtype(2 * task.graph.total_edges))
    for src, dst in edge_chunks(task, "balancing parts"):
        _count_within(src, dst, part_of, within)
    return move_nodes(part_of, task.num_parts, task.weights, task.imbalance, task.seed, attachment=within)


def move_nodes(
    part_of: Array,
    num_parts: int,
    weights: Mapping[str, Array],
    imbalance: float,
    seed: int,
    attachment: Array | None = None,
) -> Array:
    """Move nodes out of parts that hold too much, until every constraint holds or nothing helps any more.

    A node moves where it lowers the excess: the sum, over parts and constraints, of what is above the limit relative to
    the limit. Few nodes move: the heaviest first, but none heavier than what has to go; or, where attachments are
    known, those that break least for what they relieve. Where no single move helps, nodes change places. What cannot be
    reached, for instance because one node alone is too heavy, is logged as a warning.

    Args:
        part_of: (N,) integers from 0 to P - 1.
        num_parts: P.
        weights: (N,) non-negative numbers or booleans each, by name.
        imbalance: how much larger than the mean a part may be, by number of nodes and by each weight; 0.05 is 5 %.
        seed: decides between nodes that are alike.
        attachment: (N,), how much a node loses by moving, for instance neighbours in its own part.

    Returns:
        (N,), of the same dtype; `part_of` itself where nothing is too large.
    """
    constraints = balance_constraints(len(part_of), num_parts, weights, imbalance)
    loads = part_loads(part_of, num_parts, constraints)
    rng = np.random.default_rng(seed)
    moved = part_of
    for attempt in range(_PASSES):
        if not (loads > constraints.limits[:, None]).any():
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
    _warn(["nodes", *weights], loads, constraints, imbalance)
    return moved


def _who_moves_first(
    part_of: Array,
    loads: Array,
    constraints: Constraints,
    attachment: Array | None,
    rng: np.random.Generator,
    careful: bool,
) -> Array:
    """Nodes of too large parts that would relieve them, in the order in which to try them."""
    over = loads > constraints.limits[:, None]
    nodes = rng.permutation(np.flatnonzero(np.logical_or.reduce(over)[part_of]))
    relief = np.zeros(len(nodes))
    for which, limit in enumerate(constraints.limits):
        if over[which].any():
            weight = constraints.weights[which - 1, nodes] if which else 1
            relief += over[which, part_of[nodes]] * weight / limit
    nodes, relief = nodes[relief > 0], relief[relief > 0]
    by_weight = -relief if careful else relief
    first = by_weight if attachment is None else attachment[nodes] / relief
    in_order: Array = nodes[np.argsort(first, kind="stable")]
    return in_order


def _warn(names: list[str], loads: Array, constraints: Constraints, imbalance: float) -> None:
    for name, load, mean, limit in zip(names, loads, constraints.means, constraints.limits, strict=True):
        if load.max() > limit:
            logger.warning(
                "part %d holds %g of '%s', %.3f times the mean; at most %.3f times was asked for, and moving nodes "
                "could not reach that.",
                int(load.argmax()),
                load.max(),
                name,
                load.max() / mean,
                1 + imbalance,
            )


@compiled
def _count_within(src: Array, dst: Array, part_of: Array, within: Array) -> None:
    for i in range(len(src)):
        u, v = src[i], dst[i]
        if u != v and part_of[u] == part_of[v]:
            within[u] += 1
            within[v] += 1


@compiled
def _relieve(order: Array, part_of: Array, constraints: Constraints, loads: Array, careful: bool) -> int:
    """Move each of the nodes to where it lowers the excess most; the number that moved.

    careful: leave nodes that weigh more than what has to go.
    """
    num_moved = 0
    for node in order:
        here = part_of[node]
        gain, fits = 0.0, True
        for which in range(len(loads)):
            over = loads[which, here] - constraints.limits[which]
            weight = weight_of(constraints, which, node)
            if over > 0 and weight > 0:
                gain += min(over, weight) / constraints.limits[which]
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
    for which in range(len(loads)):
        loads[which, part_of[node]] -= weight_of(constraints, which, node)
        loads[which, there] += weight_of(constraints, which, node)
    part_of[node] = there


@compiled
def _best_place(node: int, here: int, constraints: Constraints, loads: Array) -> tuple[int, float]:
    """The part where a node adds least to the excess, then leaves most capacity free; and what it adds."""
    place, least, lowest = -1, np.inf, np.inf
    for part in range(loads.shape[1]):
        if part == here:
            continue
        cost, level = 0.0, 0.0
        for which in range(len(loads)):
            limit = constraints.limits[which]
            if limit > 0:
                after = loads[which, part] + weight_of(constraints, which, node)
                cost += _excess(after, limit) - _excess(loads[which, part], limit)
                level = max(level, after / limit)
        if cost < least or (cost == least and level < lowest):
            place, least, lowest = part, cost, level
    return place, least


@compiled
def _excess(load: float, limit: float) -> float:
    return max(0.0, load - limit) / limit


@compiled
def _exchange(order: Array, partners: Array, part_of: Array, constraints: Constraints, loads: Array) -> int:
    """Let nodes of too large parts change places with others, of which `_CANDIDATES` are looked at for each of them."""
    num_changes, position = 0, 0
    for node in order:
        here = part_of[node]
        if not (loads[:, here] > constraints.limits).any():
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
    """What it adds to the excess if two nodes change places."""
    change = 0.0
    for which in range(len(loads)):
        limit = constraints.limits[which]
        if limit > 0:
            goes = weight_of(constraints, which, node) - weight_of(constraints, which, partner)
            here, there = loads[which, part_of[node]], loads[which, part_of[partner]]
            change += _excess(here - goes, limit) - _excess(here, limit)
            change += _excess(there + goes, limit) - _excess(there, limit)
    return change
