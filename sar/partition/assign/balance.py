"""Keeping parts of like size: by number of nodes, and by weights such as in-edges or training nodes.

Constraint 0 is the number of nodes; the others are the weights of the task, in their order.
"""

import heapq
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from sar.errors import ConfigError
from sar.logging_setup import logger
from sar.partition.assign.compiled import compiled
from sar.partition.graph_data import Array

_PASSES = 20
_SLACK = 1e-9  # relative, for round-off in sums of weights
_SMALLEST_GAIN = 1e-12
_TRIES = 64


class Constraints(NamedTuple):
    """What parts may hold.

    weights: (C, N) float32, the weights beside the number of nodes.
    means, limits: (1 + C,) float64: what a part holds on average, and at most.
    """

    weights: Array
    means: Array
    limits: Array


def constraints(num_nodes: int, num_parts: int, weights: Mapping[str, Array], imbalance: float) -> Constraints:
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
    totals, whole = [float(num_nodes)], [True]
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


def part_loads(part_of: Array, num_parts: int, weights: Array) -> Array:
    """What the parts hold, (1 + C, P) float64; `weights` as in `Constraints`.

    Raises:
        ConfigError: there is a part below 0 or above P - 1.
    """
    if len(part_of) and not 0 <= part_of.min() <= part_of.max() < num_parts:
        raise ConfigError(f"parts go from {part_of.min()} to {part_of.max()}; expected 0 to {num_parts - 1}.")
    loads = np.zeros((1 + len(weights), num_parts))
    _add_up(part_of, weights, loads)
    return loads


def deal(sizes: Array, weights: Array, means: Array, loads: Array) -> Array:
    """Give items one after the other to the least occupied part: list scheduling (Graham, 1969).

    A part is as occupied as the largest of its loads, each relative to its mean; of equals, the first part.

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
    _deal(np.ascontiguousarray(sizes), np.ascontiguousarray(weights, np.float64), scale, loads, parts)
    return parts


def rebalance(
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
    rules = constraints(len(part_of), num_parts, weights, imbalance)
    loads = part_loads(part_of, num_parts, rules.weights)
    rng = np.random.default_rng(seed)
    moved = part_of
    for attempt in range(_PASSES):
        if not (loads > rules.limits[:, None]).any():
            return moved
        if attempt == 0:
            moved = part_of.copy()
        order = _who_moves_first(moved, loads, rules, attachment, rng, careful=attempt == 0)
        helped = _relieve(order, moved, rules.weights, rules.limits, loads, attempt == 0)
        if attempt > 0 and helped <= len(order) // 100:
            helped += _exchange(order, rng.permutation(len(moved)), moved, rules.weights, rules.limits, loads)
            if not helped:
                break
    _warn(["nodes", *weights], loads, rules, imbalance)
    return moved


def _who_moves_first(
    part_of: Array, loads: Array, rules: Constraints, attachment: Array | None, rng: np.random.Generator, careful: bool
) -> Array:
    """Nodes of too large parts that would relieve them, in the order in which to try them."""
    over = loads > rules.limits[:, None]
    nodes = rng.permutation(np.flatnonzero(np.logical_or.reduce(over)[part_of]))
    relief = np.zeros(len(nodes))
    for which, limit in enumerate(rules.limits):
        if over[which].any():
            weight = rules.weights[which - 1, nodes] if which else 1
            relief += over[which, part_of[nodes]] * weight / limit
    nodes, relief = nodes[relief > 0], relief[relief > 0]
    by_weight = -relief if careful else relief
    first = by_weight if attachment is None else attachment[nodes] / relief
    in_order: Array = nodes[np.argsort(first, kind="stable")]
    return in_order


def _warn(names: list[str], loads: Array, rules: Constraints, imbalance: float) -> None:
    for name, load, mean, limit in zip(names, loads, rules.means, rules.limits, strict=True):
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
def weight_of(weights: Array, which: int, item: int) -> float:
    """What a node weighs in constraint `which`."""
    if which == 0:
        return 1.0
    return float(weights[which - 1, item])


@compiled
def has_room(weights: Array, limits: Array, loads: Array, node: int, part: int) -> bool:
    """Whether a node can be added to a part without breaking a constraint."""
    for which in range(len(limits)):  # noqa: SIM110 compiled
        if loads[which, part] + weight_of(weights, which, node) > limits[which]:
            return False
    return True


@compiled
def _add_up(part_of: Array, weights: Array, loads: Array) -> None:
    for node in range(len(part_of)):
        for which in range(len(loads)):
            loads[which, part_of[node]] += weight_of(weights, which, node)


@compiled
def _deal(sizes: Array, weights: Array, scale: Array, loads: Array, parts: Array) -> None:
    num_parts = loads.shape[1]
    heap = [(_occupied(loads, scale, part), part) for part in range(num_parts)]
    heapq.heapify(heap)
    for item in range(len(sizes)):
        part = heap[0][1]
        parts[item] = part
        loads[0, part] += sizes[item]
        for which in range(1, len(scale)):
            loads[which, part] += weights[which - 1, item]
        heapq.heapreplace(heap, (_occupied(loads, scale, part), part))


@compiled
def _occupied(loads: Array, scale: Array, part: int) -> float:
    most = 0.0
    for which in range(len(scale)):
        most = max(most, loads[which, part] * scale[which])
    return most


@compiled
def _relieve(order: Array, part_of: Array, weights: Array, limits: Array, loads: Array, careful: bool) -> int:
    """Move each of the nodes to where it lowers the excess most; the number that moved.

    careful: leave nodes that weigh more than what has to go.
    """
    num_moved = 0
    for node in order:
        here = part_of[node]
        gain, fits = 0.0, True
        for which in range(len(limits)):
            over = loads[which, here] - limits[which]
            weight = weight_of(weights, which, node)
            if over > 0 and weight > 0:
                gain += min(over, weight) / limits[which]
                fits = fits and weight <= over
        if gain <= _SMALLEST_GAIN or (careful and not fits):
            continue
        there, cost = _best_place(node, here, weights, limits, loads)
        if there >= 0 and gain - cost > _SMALLEST_GAIN:
            _move(node, there, part_of, weights, loads)
            num_moved += 1
    return num_moved


@compiled
def _move(node: int, there: int, part_of: Array, weights: Array, loads: Array) -> None:
    for which in range(len(loads)):
        loads[which, part_of[node]] -= weight_of(weights, which, node)
        loads[which, there] += weight_of(weights, which, node)
    part_of[node] = there


@compiled
def _best_place(node: int, here: int, weights: Array, limits: Array, loads: Array) -> tuple[int, float]:
    """The part where a node adds least to the excess, then leaves most room; and what it adds."""
    place, least, lowest = -1, np.inf, np.inf
    for part in range(loads.shape[1]):
        if part == here:
            continue
        cost, level = 0.0, 0.0
        for which in range(len(limits)):
            if limits[which] > 0:
                after = loads[which, part] + weight_of(weights, which, node)
                cost += _excess(after, limits[which]) - _excess(loads[which, part], limits[which])
                level = max(level, after / limits[which])
        if cost < least or (cost == least and level < lowest):
            place, least, lowest = part, cost, level
    return place, least


@compiled
def _excess(load: float, limit: float) -> float:
    return max(0.0, load - limit) / limit


@compiled
def _exchange(order: Array, partners: Array, part_of: Array, weights: Array, limits: Array, loads: Array) -> int:
    """Let nodes of too large parts change places with others, of which `_TRIES` are looked at for each of them."""
    num_changes, position = 0, 0
    for node in order:
        here = part_of[node]
        if not (loads[:, here] > limits).any():
            continue
        for _ in range(_TRIES):
            partner = partners[position]
            position = (position + 1) % len(partners)
            there = part_of[partner]
            if there != here and _change_of_excess(node, partner, part_of, weights, limits, loads) < -_SMALLEST_GAIN:
                _move(node, there, part_of, weights, loads)
                _move(partner, here, part_of, weights, loads)
                num_changes += 1
                break
    return num_changes


@compiled
def _change_of_excess(node: int, partner: int, part_of: Array, weights: Array, limits: Array, loads: Array) -> float:
    """What it adds to the excess if two nodes change places."""
    change = 0.0
    for which in range(len(limits)):
        limit = limits[which]
        if limit > 0:
            goes = weight_of(weights, which, node) - weight_of(weights, which, partner)
            here, there = loads[which, part_of[node]], loads[which, part_of[partner]]
            change += _excess(here - goes, limit) - _excess(here, limit)
            change += _excess(there + goes, limit) - _excess(there, limit)
    return change
