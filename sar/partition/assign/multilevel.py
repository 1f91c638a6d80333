"""The method `multilevel`: size-constrained label propagation over neighbor lists on disk, and METIS.

Meyerhenke, Sanders and Schulz, "Partitioning complex networks via size-constrained clustering", SEA 2014;
semi-external (arrays over nodes in memory): Akhremtsev, Sanders and Schulz, "(Semi-)external algorithms for graph
partitioning and clustering", ALENEX 2015.

[Note: slices] A pass processes windows of the graph in order. Threads share a window by slices, whose number
only depends on the graph. The nodes of a slice choose in order. They see the choices of earlier nodes in their
slice, and the choices of all other nodes at the beginning of the window. Then the choices of the whole window are
applied in order of nodes, if they still fit. So the result does not depend on the number of threads or on timing. A
node is only visited again if a neighbor has moved since, or if it did not fit.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sar.data.arrays import Array
from sar.partition.assign.external_csr import WINDOW, ExternalCsr, Tally, Window, add_up, list_of, lists_on_disk
from sar.partition.assign.ldg import CONVERGED, greedy_parts
from sar.partition.assign.metis import divide
from sar.partition.assign.rebalance import rebalance
from sar.partition.assign.task import (
    FULL,
    AssignmentTask,
    Constraints,
    add_load,
    compiled,
    draw,
    emptiest,
    fullness,
    has_capacity,
    part_loads,
    within_capacity,
)

COARSE_ENTRIES = 1 << 20
"""Maximum number of entries for METIS, unless memory is short."""
ENTRY_BYTES = 64
"""Maximum memory of METIS per entry."""
CLUSTERS = 1 / 32, 1 / 2048
"""Maximum size of a cluster relative to a part's limit; the second if large clusters leave METIS too few entries."""
TOO_LITTLE = 1 / 4
"""Fraction of METIS's entries below which the clusters are considered too large."""
SHRINKS = 0.9
"""Clusters are contracted if there are at most this many per node."""
WINDOWS = 64
"""Minimum number of windows of a graph."""
SLICES = 4
"""Slices in a window of a large graph, for threads."""
IN_ANY_ORDER = 2048
"""With at most so many clusters, larger ones for the order of nodes would gain little."""
CLUSTER_PASSES = 3
REFINE_PASSES = 8
TRIALS = 4
"""Trials of METIS on a graph of clusters; the best is used."""

Report = Callable[[float], None]
"""Called with the completed fraction."""


class Level(NamedTuple):
    """A graph, from the given one to the coarsest."""

    csr: ExternalCsr
    weights: Array  # of nodes, (N, K), in units of the capacity of a part


class Nodes(NamedTuple):
    """State of the nodes between passes, (N,) each."""

    label: Array  # the current group
    wanted: Array  # the chosen group
    changing: Array  # whether groups of neighbors have changed since the last visit


def multilevel(task: AssignmentTask) -> Array:
    """Contract clusters until METIS takes little memory, then project its parts back and refine them.

    Clusters come from size-constrained label propagation. METIS partitions the coarsest graph, on randomly
    sampled edges if the graph is still too large. On every level, label propagation between the parts,
    within their capacities, reduces the cut.

    Memory: about 100 bytes per node, 16 more for each weight, and 100 MB. Disk: as `ExternalCsr`, for each level.
    """
    finest = Level(lists_on_disk(task), task.relative_weights())
    levels = [finest]
    if task.num_parts == 1 or finest.csr.num_nodes <= task.num_parts or finest.csr.num_entries == 0:
        # METIS does not support such graphs.
        if task.clusters is not None:
            task.clusters.extend(_coarsen(levels, task, 0, IN_ANY_ORDER))
        several = task.num_parts > 1
        return rebalance(task, greedy_parts(*finest, task)) if several else np.zeros(finest.csr.num_nodes, np.int32)
    entries = COARSE_ENTRIES
    if task.memory is not None:
        entries = max(1, min(entries, task.memory // 2 // ENTRY_BYTES))
    clusters = _coarsen(levels, task, entries)
    if task.clusters is not None:
        task.clusters.extend(clusters)
        if levels[-1].csr.num_entries <= entries:  # else there are no larger clusters
            task.clusters.extend(_coarsen(levels.copy(), task, 0, IN_ANY_ORDER))
    task.progress("METIS", 0.0)
    part_of = divide(levels[-1].csr, levels[-1].weights, task, entries, TRIALS if clusters else 1)
    while True:
        report = partial(task.progress, f"refining level {len(levels)}")
        level = levels.pop()
        refine(level.csr, level.weights, part_of, task.num_parts, REFINE_PASSES, task.seed, report)
        if not levels:
            return rebalance(task, part_of)
        part_of = part_of[clusters.pop()]


def _coarsen(levels: list[Level], task: AssignmentTask, entries: int, nodes: int = 0) -> list[Array]:
    """Add levels until the last one has so few entries or nodes, or no clusters; the cluster of each node, by level."""
    clusters = []
    while levels[-1].csr.num_entries > entries and levels[-1].csr.num_nodes > nodes:
        if (found := _coarser(levels, task, entries)) is None:
            break
        label, level = found
        clusters.append(label)
        levels.append(level)
    return clusters


def _coarser(levels: list[Level], task: AssignmentTask, entries: int) -> tuple[Array, Level] | None:
    """Cluster the last level; return clusters and their graph, or None if there are too many or too few."""
    level, number = levels[-1], len(levels)
    found = None
    for i, limit in enumerate(CLUSTERS if number == 1 else CLUSTERS[:1]):
        report = partial(task.progress, f"clustering level {number}{', smaller clusters' if i else ''}")
        label, count = cluster(level.csr, level.weights, limit, CLUSTER_PASSES, task.seed, report)
        if count > SHRINKS * level.csr.num_nodes:
            break
        if count <= task.num_parts:
            continue
        csr = level.csr.contracted(label, count, task.scratch / f"lists-{number}-{i}")
        weights = [np.bincount(label, weights=column, minlength=count) for column in level.weights.T]
        found = label, Level(csr, np.stack(weights, axis=1, dtype=np.float32, casting="same_kind"))
        if csr.num_entries >= TOO_LITTLE * entries:
            break
    return found


def cluster(
    csr: ExternalCsr, weights: Array, limit: float, passes: int, seed: int, progress: Report
) -> tuple[Array, int]:
    """Cluster nodes that have most of their edges among themselves; return clusters, (N,), and their number.

    Every node starts as its own cluster. In each pass, in order of IDs, a node moves to the cluster to which it has
    most edges, if it fits. Then single nodes join other single nodes whose best cluster is the same, or which also
    have no neighbors; this also contracts stars.

    `limit` bounds each weight, (N, K), of a cluster. There are at most `passes` passes; the seed breaks ties.
    """
    label = np.arange(csr.num_nodes, dtype=csr.node_dtype)
    constraints, loads = within_capacity(weights, limit), weights.copy()
    _passes(_choose_clusters, csr, constraints, loads, label, range(seed, seed + passes), progress)
    tally = _tally(csr, label, loads)
    alone = (np.bincount(label, minlength=csr.num_nodes) == 1)[label]
    waiting = np.full(csr.num_nodes + 1, -1, csr.node_dtype)
    for window in csr.windows():
        _join_alike(window, constraints, loads, label, tally, alone, waiting)
    number = np.zeros_like(label)  # consecutive numbers of the remaining labels
    number[label] = 1
    np.cumsum(number, out=number)
    return number[label] - 1, int(number[-1])


def refine(
    csr: ExternalCsr, weights: Array, part_of: Array, num_parts: int, passes: int, seed: int, progress: Report
) -> None:
    """Move nodes, in place, to the part to which they have most edges, if they fit, and out of parts that are too full.

    Weights, (N, K), are in units of the capacity of a part. There are at most `passes` passes; the seed breaks ties.
    """
    constraints = within_capacity(weights)
    loads = part_loads(part_of, num_parts, constraints)
    _passes(_choose_parts, csr, constraints, loads, part_of, range(seed, seed + passes), progress)


def _passes(
    choose: Any, csr: ExternalCsr, constraints: Constraints, loads: Array, label: Array, seeds: range, progress: Report
) -> None:
    """Update labels, (N,), in place with `choose` until few nodes change: [Note: slices]."""
    nodes = Nodes(label, label.copy(), np.ones(len(label), np.bool_))
    entries = min(WINDOW, csr.num_entries // WINDOWS)
    slices = SLICES if entries >= WINDOW // 8 else 1
    if slices > 1:
        import torch  # its threads pay here, and its import

        from sar.kernels.threads import run_fixed
    tallies = [_tally(csr, label, loads) for _ in range(min(torch.get_num_threads(), slices) if slices > 1 else 1)]
    shares = np.linspace(0, 1, slices + 1)[1:-1]
    for i, seed in enumerate(seeds):
        moved = 0
        for window in csr.windows(entries):
            inner = np.searchsorted(window.bounds, window.bounds[0] + shares * len(window.neighbours))
            cuts = [window.first, *(window.first + inner).tolist(), window.last]
            operands = window, constraints, loads, nodes, np.uint64(seed)
            if slices > 1:
                run_fixed(choose, cuts, tallies, *operands)
            else:
                choose(*cuts, tallies[0], *operands)
            moved += _settle(window, constraints, loads, nodes)
            progress((i + window.last / csr.num_nodes) / len(seeds))
        if moved <= CONVERGED * csr.num_nodes:
            break


def _tally(csr: ExternalCsr, label: Array, loads: Array) -> Tally:
    """An empty tally with one label per load."""
    return Tally(np.zeros(len(loads), loads.dtype), np.empty(min(len(loads), csr.max_degree) + 1, label.dtype))


@compiled
def _choose_clusters(
    first: int, last: int, tally: Tally, window: Window, constraints: Constraints, loads: Array, nodes: Nodes, seed: int
) -> None:
    """Let the nodes of a slice, `first` to `last` - 1, choose their clusters."""
    sums, labels = tally
    label, wanted, changing = nodes
    for v in range(first, last):
        if not changing[v]:
            continue
        count = add_up(window, v, label, wanted, first, last, tally)
        own = label[v]
        best, most, luck = own, sums[own], np.uint64(0xFFFFFFFFFFFFFFFF)
        for i in range(count):
            one = labels[i]
            total = sums[one]
            sums[one] = 0
            if total >= most and one != own:
                chance = draw(seed, v, one)
                if (total > most or chance > luck) and has_capacity(constraints, loads, v, one):
                    best, most, luck = one, total, chance
        wanted[v] = best


@compiled
def _choose_parts(
    first: int, last: int, tally: Tally, window: Window, constraints: Constraints, loads: Array, nodes: Nodes, seed: int
) -> None:
    """Let the nodes of a slice, `first` to `last` - 1, choose their parts, as if other slices did not move."""
    sums, labels = tally
    part_of, wanted, changing = nodes
    loads = loads.copy()
    for v in range(first, last):
        if not changing[v]:
            continue
        count = add_up(window, v, part_of, wanted, first, last, tally)
        own = part_of[v]
        add_load(constraints, loads, v, own, -1.0)
        best, most, fill = own, sums[own], fullness(constraints, loads, v, own)
        if fill >= FULL:
            best, most, fill = -1, 0.0, 0.0
        for i in range(count):
            part = labels[i]
            total = sums[part]
            sums[part] = 0
            if part != own and total >= most:
                here = fullness(constraints, loads, v, part)
                if here < FULL and (total > most or here < fill):
                    best, most, fill = part, total, here
        if best < 0:
            best = emptiest(constraints, loads, v, seed)
            best = own if fullness(constraints, loads, v, best) >= FULL else best
        add_load(constraints, loads, v, best, 1.0)
        wanted[v] = best


@compiled
def _settle(window: Window, constraints: Constraints, loads: Array, nodes: Nodes) -> int:
    """Apply the chosen labels of a window's nodes if they fit; return how many nodes moved."""
    label, wanted, changing = nodes
    moved = 0
    changing[window.first : window.first + window.bounds.size - 1] = False
    for v in range(window.first, window.first + window.bounds.size - 1):
        there = wanted[v]
        if there == label[v]:
            continue
        if fullness(constraints, loads, v, there) >= FULL:
            wanted[v], changing[v] = label[v], True
            continue
        add_load(constraints, loads, v, label[v], -1.0)
        add_load(constraints, loads, v, there, 1.0)
        label[v] = there
        moved += 1
        begin, end = list_of(window, v)
        for e in range(begin, end):
            changing[window.neighbours[e]] = True
    return moved


@compiled
def _join_alike(
    window: Window, constraints: Constraints, loads: Array, label: Array, tally: Tally, alone: Array, waiting: Array
) -> None:
    """Join single nodes of a window that prefer the same cluster.

    waiting: (N + 1,), by preferred cluster, the open cluster for nodes that do not fit there; the last entry is for
        nodes without edges; -1: none yet.
    """
    sums, labels = tally
    for v in range(window.first, window.first + window.bounds.size - 1):
        if not alone[v]:
            continue
        count = add_up(window, v, label, label, 0, 0, tally)
        best, most = label.size, sums.dtype.type(0)
        for i in range(count):
            if sums[labels[i]] > most:
                best, most = labels[i], sums[labels[i]]
            sums[labels[i]] = 0
        there = waiting[best]
        if there >= 0 and has_capacity(constraints, loads, v, there):
            add_load(constraints, loads, v, label[v], -1.0)
            add_load(constraints, loads, v, there, 1.0)
            label[v] = there
        else:
            waiting[best] = label[v]
