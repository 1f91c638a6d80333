"""Label propagation with limited sizes, over neighbour lists on disk: clusters of nodes, and better parts.

Meyerhenke, Sanders and Schulz, "Partitioning complex networks via size-constrained clustering", SEA 2014;
semi-external: Akhremtsev, Sanders and Schulz, "(Semi-)external algorithms for graph partitioning and clustering",
ALENEX 2015.
"""

from collections.abc import Callable

import numpy as np

from sar.partition.assign.compiled import compiled
from sar.partition.assign.external_csr import ExternalCsr
from sar.partition.assign.ldg import FULL, add_load, add_up, draw, emptiest, fullness
from sar.partition.graph_data import Array

SETTLED = 0.001
"""Share of the nodes: passes end when fewer move."""


def cluster(
    csr: ExternalCsr, weights: Array, limit: float, passes: int, seed: int, progress: Callable[[float], None]
) -> tuple[Array, int]:
    """Clusters of nodes that have most of their edges among themselves.

    Every node starts as a cluster of its own; in each pass, in order of their IDs, a node goes to the cluster that it
    has most edges with, among those that it fits into. Then nodes that are still alone join others for which the same
    cluster would be the best, or which have no neighbours like them; so stars shrink too.

    Args:
        csr: neighbour lists, of N nodes.
        weights: (N, K).
        limit: what a cluster may have of each weight.
        passes: at most.
        seed: of ties.
        progress: called with the share that is done.

    Returns:
        The cluster of every node, (N,), and how many clusters there are.
    """
    label, sizes = np.arange(csr.num_nodes, dtype=csr.node_dtype), weights.copy()
    tally, touched = np.zeros(csr.num_nodes, np.float32), np.empty(csr.max_degree, csr.node_dtype)
    for i in range(passes):
        moved = 0
        for window in csr.windows():
            moved += _cluster_pass(*window, weights, label, sizes, limit, tally, touched, np.uint64(seed + i))
            progress((i + window.last / csr.num_nodes) / (passes + 1))
        if moved <= SETTLED * csr.num_nodes:
            break
    alone = (np.bincount(label, minlength=csr.num_nodes) == 1)[label]
    waiting = np.full(csr.num_nodes + 1, -1, csr.node_dtype)
    for window in csr.windows():
        _join_alike(*window, weights, label, sizes, limit, tally, touched, alone, waiting)
    return _renumbered(label)


def _renumbered(label: Array) -> tuple[Array, int]:
    """Labels as consecutive numbers, and how many there are."""
    new = np.zeros_like(label)
    new[label] = 1
    count = int(new.sum())
    np.cumsum(new, out=new)
    return new[label] - 1, count


def refine(
    csr: ExternalCsr,
    weights: Array,
    part_of: Array,
    num_parts: int,
    passes: int,
    seed: int,
    progress: Callable[[float], None],
) -> None:
    """Move nodes, in place, to the part that they have most edges with, where there is room; out of parts too full.

    Args:
        csr: neighbour lists, of N nodes.
        weights: (N, K), in units of the capacity of a part.
        part_of: (N,) int32.
        num_parts: P.
        passes: at most.
        seed: of ties.
        progress: called with the share that is done.
    """
    loads = np.stack([np.bincount(part_of, weights=column, minlength=num_parts) for column in weights.T], axis=1)
    counts, touched = np.zeros(num_parts), np.empty(num_parts, np.int64)
    for i in range(passes):
        moved = 0
        for window in csr.windows():
            moved += _refine_pass(*window, weights, part_of, loads, counts, touched, np.uint64(seed + i))
            progress((i + window.last / csr.num_nodes) / passes)
        if moved <= SETTLED * csr.num_nodes:
            break


@compiled
def _fits(sizes: Array, label: int, weights: Array, v: int, limit: float) -> bool:
    for k in range(weights.shape[1]):  # noqa: SIM110 compiled
        if sizes[label, k] + weights[v, k] > limit:
            return False
    return True


@compiled
def _cluster_pass(
    first: int,
    bounds: Array,
    neighbours: Array,
    edge_weights: Array | None,
    weights: Array,
    label: Array,
    sizes: Array,
    limit: float,
    tally: Array,
    touched: Array,
    seed: int,
) -> int:
    """Let the nodes of a window choose; returns how many moved. tally is 0 before and after."""
    moved = 0
    for v in range(first, first + bounds.size - 1):
        count = add_up(v - first, bounds, neighbours, edge_weights, label, tally, touched)
        own = label[v]
        best, most = own, tally[own]
        for i in range(count):
            one = touched[i]
            wins = tally[one] > most or (
                tally[one] == most and best != own and draw(seed, v, one) > draw(seed, v, best)
            )
            if wins and one != own and _fits(sizes, one, weights, v, limit):
                best, most = one, tally[one]
        for i in range(count):
            tally[touched[i]] = 0
        if best != own:
            add_load(sizes, own, weights, v, -1.0)
            add_load(sizes, best, weights, v, 1.0)
            label[v] = best
            moved += 1
    return moved


@compiled
def _join_alike(
    first: int,
    bounds: Array,
    neighbours: Array,
    edge_weights: Array | None,
    weights: Array,
    label: Array,
    sizes: Array,
    limit: float,
    tally: Array,
    touched: Array,
    alone: Array,
    waiting: Array,
) -> None:
    """Put nodes of a window that are alone with others like them.

    waiting: (N + 1,), the cluster that is open for nodes which would best be in each cluster but do not fit in; the
        last for nodes without edges; -1: none yet.
    """
    for v in range(first, first + bounds.size - 1):
        if not alone[v]:
            continue
        count = add_up(v - first, bounds, neighbours, edge_weights, label, tally, touched)
        best, most = label.size, tally.dtype.type(0)
        for i in range(count):
            if tally[touched[i]] > most:
                best, most = touched[i], tally[touched[i]]
        for i in range(count):
            tally[touched[i]] = 0
        there = waiting[best]
        if there >= 0 and _fits(sizes, there, weights, v, limit):
            add_load(sizes, label[v], weights, v, -1.0)
            add_load(sizes, there, weights, v, 1.0)
            label[v] = there
        else:
            waiting[best] = label[v]


@compiled
def _refine_pass(
    first: int,
    bounds: Array,
    neighbours: Array,
    edge_weights: Array | None,
    weights: Array,
    part_of: Array,
    loads: Array,
    counts: Array,
    touched: Array,
    seed: int,
) -> int:
    """Move nodes of a window where that gains; returns how many moved. counts is 0 before and after."""
    moved = 0
    for v in range(first, first + bounds.size - 1):
        count = add_up(v - first, bounds, neighbours, edge_weights, part_of, counts, touched)
        own = part_of[v]
        add_load(loads, own, weights, v, -1.0)
        best, most, fill = own, counts[own], fullness(loads, own, weights, v)
        if fill >= FULL:
            best, most, fill = -1, 0.0, 0.0
        for i in range(count):
            part = touched[i]
            here = fullness(loads, part, weights, v)
            if part != own and here < FULL and (counts[part] > most or (counts[part] == most and here < fill)):
                best, most, fill = part, counts[part], here
        if best < 0:
            best = emptiest(loads, weights, v, seed)
            best = own if fullness(loads, best, weights, v) >= FULL else best
        for i in range(count):
            counts[touched[i]] = 0
        add_load(loads, best, weights, v, 1.0)
        moved += best != own
        part_of[v] = best
    return moved
