"""The input of a partition method: edges as a stream, the limits of parts, and helpers to keep to them.

A method is a function from an `AssignmentTask` to the part of every node, (N,) integers from 0 to P - 1. It may read
the stream of edges several times, and holds O(nodes) memory. Equal tasks give equal assignments. A method respects the
limits of `task.constraints()` during assignment (`has_capacity`, `fullness`), or assigns clusters to the least loaded
part (`list_schedule`). Most methods end with `rebalance(task, parts)`, which moves nodes if a limit is exceeded.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from sar.data.arrays import Array
from sar.errors import ConfigError
from sar.host.compiler import compile_cached
from sar.partition.graph_source import GraphSource, Progress, check_parts
from sar.tensors import splitmix
from sar.tensors.splitmix import STEP

VOLUME_BOUND = 0.5
"""Default volume bound of `spring`."""
FULL = 2.0
"""The result of `fullness` for a node that does not fit."""
_SLACK = 1e-9  # relative, for round-off in sums of weights
_ROUND_OFF = 1e-7  # of relative weights: less than one of up to five million equal nodes in a part

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile a loop with Numba and cache its code on disk. It may call helpers of this folder."""
    return compile_cached(function, nogil=True, error_model="numpy")


class Constraints(NamedTuple):
    """Weights of nodes, and limits of a group of nodes (a part or a cluster), for each of K weights."""

    weights: Array  # (N, K) float32
    limits: Array  # (K,) float64


@dataclass(frozen=True)
class AssignmentTask:
    """The input of a partition method."""

    graph: GraphSource  # `graph.chunks()` are the edges, with nodes in order of node types
    num_parts: int  # P
    scratch: Path  # an empty directory for the method's files; removed afterwards
    seed: int = 0  # for all random choices
    weights: Mapping[str, Array] = field(default_factory=dict)  # to balance in addition to nodes: (N,) numbers >= 0
    imbalance: float = 0.05  # allowed excess over the mean, by nodes and by each weight: 0.05 is 5 %
    memory: int | None = None  # bytes that the method may add to the process; None: no limit
    progress: Progress = lambda doing, share: None
    volume_bound: float = VOLUME_BOUND  # for `spring`: maximum volume of a cluster relative to a part's mean
    clusters: list[Array] | None = None
    """If not None, a method adds the clusters that it finds, numbered from 0: the cluster of each node, (N,), then the
    larger cluster of each of these, and so on."""

    def constraints(self) -> Constraints:
        """Weights of nodes and limits of parts: first the number of nodes, then each of the weights.

        A limit is (1 + imbalance) times the mean; for nodes and whole numbers, at least the mean rounded
        up. `ConfigError` if a weight does not have one number per node, or is negative or not finite.
        """
        num_nodes = self.graph.total_nodes
        if self.num_parts < 1:
            raise ConfigError(f"cannot divide nodes into {self.num_parts} parts; expected at least 1.")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed}; expected 0 to 2**63 - 1.")
        if not 0 <= self.imbalance < np.inf:
            raise ConfigError(
                f"imbalance is {self.imbalance}; expected a number from 0 on: 0.05 is 5 % above the mean."
            )
        weights = np.ones((num_nodes, 1 + len(self.weights)), np.float32)
        whole = [True]  # whether weights are whole numbers
        for column, (name, given) in enumerate(self.weights.items(), start=1):
            weight = np.asarray(given)
            if weight.shape != (num_nodes,):
                found = f"weight '{name}' has shape {weight.shape}"
                raise ConfigError(f"{found}; expected ({num_nodes},), a number per node.")
            bad = ~((weight >= 0) & (weight < np.inf))
            if bad.any():
                node = int(bad.argmax())
                raise ConfigError(f"weight '{name}' of node {node} is {weight[node]}; expected a number from 0 on.")
            weights[:, column] = weight
            whole.append(weight.dtype.kind in "bui")
        means = part_means(weights, self.num_parts)
        limits = means * (1 + self.imbalance) * (1 + _SLACK)
        limits[whole] = np.maximum(np.floor(limits), np.ceil(means))[whole]
        return Constraints(weights, limits)

    def relative_weights(self) -> Array:  # (N, K) float32
        """Weights of nodes, in units of a part's limit; without weights that are 0 at all nodes."""
        weights, limits = self.constraints()
        used = limits > 0
        relative = weights if used.all() else np.compress(used, weights, axis=1)
        return np.divide(relative, limits[used], out=relative, casting="same_kind")


Method = Callable[[AssignmentTask], Array]


def part_means(weights: Array, num_parts: int) -> Array:
    """The mean load of a part, (K,) float64, by the weights of nodes, (N, K)."""
    return np.array([weight.sum(dtype=np.float64) for weight in weights.T]) / num_parts


def within_capacity(weights: Array, share: float = 1.0) -> Constraints:
    """Constraints that allow a group this fraction of a part's limit, by relative weights, (N, K)."""
    return Constraints(weights, np.full(weights.shape[1], share))


def part_loads(part_of: Array, num_parts: int, constraints: Constraints) -> Array:
    """The loads of the parts, (P, K) float64; `ConfigError` for parts below 0 or above P - 1."""
    check_parts(part_of, len(constraints.weights), num_parts, "the assignment")
    loads = np.zeros((num_parts, len(constraints.limits)))
    _add_up(part_of, constraints, loads)
    return loads


def list_schedule(weights: Array, means: Array, loads: Array) -> Array:
    """Assign items in order to the part with the smallest load (Graham, 1969); return the part of each, (M,) int32.

    A part's load is the maximum of its `loads`, (P, K), relative to `means`, (K,); ties go to the first part.
    `weights`, (M, K), of the items are added to `loads`.
    """
    parts = np.empty(len(weights), np.int32)
    scale = np.divide(1, means, out=np.zeros_like(means), where=means > 0)
    _schedule(np.ascontiguousarray(weights, np.float64), scale, loads, parts)
    return parts


def edge_chunks(task: AssignmentTask, doing: str) -> Iterator[tuple[Array, Array]]:
    """Chunks of sources and destinations, (rows,) int64 each, with a call of `task.progress` after each chunk."""
    done = 0
    for src, dst in task.graph.chunks():
        yield src, dst
        done += len(src)
        task.progress(doing, done / task.graph.total_edges)


@compiled
def has_capacity(constraints: Constraints, loads: Array, node: int, group: int) -> bool:
    """Whether a node can be added to a group, with loads (groups, K), without exceeding a limit."""
    for k in range(constraints.limits.size):
        if loads[group, k] + constraints.weights[node, k] > constraints.limits[k]:
            return False
    return True


@compiled
def add_load(constraints: Constraints, loads: Array, node: int, group: int, sign: float) -> None:
    """Add the weights of a node, times `sign`, to the loads of a group."""
    for k in range(constraints.limits.size):
        loads[group, k] += sign * constraints.weights[node, k]


@compiled
def fullness(constraints: Constraints, loads: Array, node: int, part: int) -> float:
    """The maximum load of a part, 0 to 1, by relative weights; `FULL` if the node does not fit."""
    fullest: float = 0.0
    for k in range(constraints.limits.size):
        weight = constraints.weights[node, k]
        if weight > 0 and loads[part, k] + weight > constraints.limits[k] + _ROUND_OFF:
            return FULL
        fullest = max(fullest, min(loads[part, k], 1.0))
    return fullest


@compiled
def emptiest(constraints: Constraints, loads: Array, node: int, seed: int) -> int:
    """The part with the most free capacity, by relative weights; if no part has space, the least full part."""
    best, best_fill = 0, np.inf
    for part in range(loads.shape[0]):
        fill = fullness(constraints, loads, node, part)
        if fill >= FULL:
            for k in range(loads.shape[1]):
                fill = max(fill, FULL + loads[part, k])
        if fill < best_fill or (fill == best_fill and draw(seed, node, part) > draw(seed, node, best)):
            best, best_fill = part, fill
    return best


@compiled
def root(into: Array, one: int) -> int:
    """The cluster that a cluster has been merged into, with path halving."""
    while into[one] != one:
        into[one] = into[into[one]]
        one = into[one]
    return one


@compiled
def follow(into: Array) -> None:
    """Let every cluster point to its final cluster."""
    for one in range(len(into)):
        into[one] = root(into, one)


_mix = compiled(splitmix.mix)


@compiled
def draw(seed: int, v: int, choice: int) -> int:
    """A random number, uint64, for node v and one of its choices."""
    drawn: int = _mix(seed + np.uint64(v) * STEP + np.uint64(choice) * np.uint64(0xD1B54A32D192ED03))
    return drawn


@compiled
def _add_up(part_of: Array, constraints: Constraints, loads: Array) -> None:
    for node in range(len(part_of)):
        add_load(constraints, loads, node, part_of[node], 1.0)


@compiled
def _schedule(weights: Array, scale: Array, loads: Array, parts: Array) -> None:
    heap = [(_largest_load(loads, scale, part), part) for part in range(loads.shape[0])]
    heapq.heapify(heap)
    for item in range(len(weights)):
        part = heap[0][1]
        parts[item] = part
        for k in range(len(scale)):
            loads[part, k] += weights[item, k]
        heapq.heapreplace(heap, (_largest_load(loads, scale, part), part))


@compiled
def _largest_load(loads: Array, scale: Array, part: int) -> float:
    most = 0.0
    for k in range(len(scale)):
        most = max(most, loads[part, k] * scale[k])
    return most
