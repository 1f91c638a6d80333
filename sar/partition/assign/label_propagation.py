"""Label propagation with limited sizes, over neighbour lists on disk: clusters of nodes, and better parts.

Meyerhenke, Sanders and Schulz, "Partitioning complex networks via size-constrained clustering", SEA 2014;
semi-external: Akhremtsev, Sanders and Schulz, "(Semi-)external algorithms for graph partitioning and clustering",
ALENEX 2015.
"""

from collections.abc import Callable

import numpy as np

from sar.partition.assign.capacity import FULL, Capacity, add_load, draw, emptiest, fullness
from sar.partition.assign.compiled import compiled
from sar.partition.assign.external_csr import ExternalCsr, Tally, Window, add_up, clear
from sar.partition.assign.ldg import CONVERGED
from sar.partition.graph_data import Array


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
    label = np.arange(csr.num_nodes, dtype=csr.node_dtype)
    capacity = Capacity(weights, loads=weights.copy())
    tally = Tally(np.zeros(csr.num_nodes, np.float32), np.empty(csr.max_degree, csr.node_dtype))
    for i in range(passes):
        moved = 0
        for window in csr.windows():
            moved += _cluster_pass(window, capacity, limit, label, tally, np.uint64(seed + i))
            progress((i + window.last / csr.num_nodes) / (passes + 1))
        if moved <= CONVERGED * csr.num_nodes:
            break
    alone = (np.bincount(label, minlength=csr.num_nodes) == 1)[label]
    waiting = np.full(csr.num_nodes + 1, -1, csr.node_dtype)
    for window in csr.windows():
        _join_alike(window, capacity, limit, label, tally, alone, waiting)
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
    """Move nodes, in place, to the part that they have most edges with, where they fit in; out of parts too full.

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
    capacity = Capacity(weights, loads)
    tally = Tally(np.zeros(num_parts), np.empty(num_parts, np.int64))
    for i in range(passes):
        moved = 0
        for window in csr.windows():
            moved += _refine_pass(window, capacity, part_of, tally, np.uint64(seed + i))
            progress((i + window.last / csr.num_nodes) / passes)
        if moved <= CONVERGED * csr.num_nodes:
            break


@compiled
def _fits(capacity: Capacity, label: int, v: int, limit: float) -> bool:
    weights, loads = capacity
    for k in range(weights.shape[1]):  # noqa: SIM110 compiled
        if loads[label, k] + weights[v, k] > limit:
            return False
    return True


@compiled
def _cluster_pass(window: Window, capacity: Capacity, limit: float, label: Array, tally: Tally, seed: int) -> int:
    """Let the nodes of a window choose their clusters; returns how many moved."""
    sums, labels = tally
    moved = 0
    for v in range(window.first, window.first + window.bounds.size - 1):
        count = add_up(window, v, label, tally)
        own = label[v]
        best, most = own, sums[own]
        for i in range(count):
            one = labels[i]
            wins = sums[one] > most or (sums[one] == most and best != own and draw(seed, v, one) > draw(seed, v, best))
            if wins and one != own and _fits(capacity, one, v, limit):
                best, most = one, sums[one]
        clear(tally, count)
        if best != own:
            _change(capacity, own, best, v)
            label[v] = best
            moved += 1
    return moved


@compiled
def _join_alike(
    window: Window, capacity: Capacity, limit: float, label: Array, tally: Tally, alone: Array, waiting: Array
) -> None:
    """Put nodes of a window that are alone with others like them.

    waiting: (N + 1,), the cluster that is open for nodes which would best be in each cluster but do not fit in; the
        last for nodes without edges; -1: none yet.
    """
    sums, labels = tally
    for v in range(window.first, window.first + window.bounds.size - 1):
        if not alone[v]:
            continue
        count = add_up(window, v, label, tally)
        best, most = label.size, sums.dtype.type(0)
        for i in range(count):
            if sums[labels[i]] > most:
                best, most = labels[i], sums[labels[i]]
        clear(tally, count)
        there = waiting[best]
        if there >= 0 and _fits(capacity, there, v, limit):
            _change(capacity, label[v], there, v)
            label[v] = there
        else:
            waiting[best] = label[v]


@compiled
def _refine_pass(window: Window, capacity: Capacity, part_of: Array, tally: Tally, seed: int) -> int:
    """Move nodes of a window where that gains; returns how many moved."""
    sums, labels = tally
    moved = 0
    for v in range(window.first, window.first + window.bounds.size - 1):
        count = add_up(window, v, part_of, tally)
        own = part_of[v]
        add_load(capacity, own, v, -1.0)
        best, most, fill = own, sums[own], fullness(capacity, own, v)
        if fill >= FULL:
            best, most, fill = -1, 0.0, 0.0
        for i in range(count):
            part = labels[i]
            here = fullness(capacity, part, v)
            if part != own and here < FULL and (sums[part] > most or (sums[part] == most and here < fill)):
                best, most, fill = part, sums[part], here
        if best < 0:
            best = emptiest(capacity, v, seed)
            best = own if fullness(capacity, best, v) >= FULL else best
        clear(tally, count)
        add_load(capacity, best, v, 1.0)
        moved += best != own
        part_of[v] = best
    return moved


@compiled
def _change(capacity: Capacity, before: int, after: int, v: int) -> None:
    add_load(capacity, before, v, -1.0)
    add_load(capacity, after, v, 1.0)
