"""Which nodes of a partitioned graph each worker owns, whatever the number of workers.

With as many partitions as workers, worker r owns partition r; with more, consecutive partitions with about equally many
edges; with fewer, the workers of a partition divide its nodes in runs of about equally many nodes and edges into them.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sar.storage.part_graph import DST, LocalGraph, PartFile, check_node_ids
from sar.storage.partition_json import PartitionJson, graph_path


class WorkerShare(NamedTuple):
    """A worker's nodes: those of the partitions `parts` whose global IDs are in [start, end)."""

    parts: list[int]
    start: int
    end: int

    @classmethod
    def of(cls, spec: PartitionJson, worker: int, workers: int) -> "WorkerShare":
        """The share of one worker of so many; where these share a partition, its graph is read."""
        if workers <= spec.num_parts:
            return cls.all(spec, workers)[worker]
        dealt = enumerate(deal_workers(_edges(spec), workers))
        part, sharing = next((part, sharing) for part, sharing in dealt if worker in sharing)
        return _divided(spec, part, len(sharing))[worker - sharing[0]]

    @classmethod
    def all(cls, spec: PartitionJson, workers: int) -> list["WorkerShare"]:
        """The shares of so many workers; the graph of a partition that some share is read once."""
        if workers > spec.num_parts:
            dealt = enumerate(deal_workers(_edges(spec), workers))
            return [share for part, sharing in dealt for share in _divided(spec, part, len(sharing))]
        ranges, runs = spec.partition_ranges, deal_parts(_edges(spec), workers)
        return [cls([*run], ranges[run[0]][0], ranges[run[-1]][1]) for run in runs]

    def rows(self, spec: PartitionJson, type_id: int) -> dict[int, slice]:
        """Which of each partition's nodes of a type the worker has, by partition."""
        cuts = {}
        for part in self.parts:
            start, end = spec.node_ranges[part, type_id].tolist()
            low, high = max(self.start, start), max(min(self.end, end), start)
            cuts[part] = slice(min(low, high) - start, high - start)
        return cuts


def _edges(spec: PartitionJson) -> list[int]:
    """Into the nodes of each partition."""
    edges: list[int] = (spec.edge_ranges[..., 1] - spec.edge_ranges[..., 0]).sum(axis=1).tolist()
    return edges


def _divided(spec: PartitionJson, part: int, workers: int) -> list[WorkerShare]:
    """The shares of a partition's workers."""
    first, end = spec.partition_ranges[part]
    if workers == 1:
        return [WorkerShare([part], first, end)]
    graph = PartFile(graph_path(spec, part)).read()
    check_node_ids(spec, part, graph)
    runs = equal_runs(node_costs(graph, (first, end)), workers)
    return [WorkerShare([part], first + start, first + end) for start, end in runs]


def node_costs(graph: LocalGraph, own: tuple[int, int]) -> Tensor:
    """What each of a partition's nodes costs its worker: one, and one for each edge into it, (N_i,) int64."""
    in_degrees = torch.bincount(graph.edges[DST], minlength=len(graph.node_id))
    costs = torch.ones(own[1] - own[0], dtype=torch.int64)
    costs[graph.node_id[graph.is_inner] - own[0]] += in_degrees[graph.is_inner]
    return costs


def deal_parts(sizes: Sequence[int], workers: int) -> list[range]:
    """Consecutive partitions for every worker, of about equal size.

    Args:
        sizes: of the partitions, for instance their edges.
        workers: W, at most as many as partitions. Every worker gets at least one.
    """
    ends = list(accumulate(sizes))
    cuts = [0]
    for worker in range(1, workers):
        goal = ends[-1] * worker / workers
        first, last = cuts[-1] + 1, len(sizes) - (workers - worker)
        cuts.append(min(range(first, last + 1), key=lambda cut: abs(ends[cut - 1] - goal)))
    return [range(begin, end) for begin, end in pairwise([*cuts, len(sizes)])]


def deal_workers(sizes: Sequence[int], workers: int) -> list[range]:
    """Consecutive workers for every partition, more for larger ones.

    Args:
        sizes: of the partitions, for instance their edges.
        workers: W, at least as many as partitions. Every partition gets at least one.
    """
    counts = [1] * len(sizes)
    for _ in range(workers - len(sizes)):
        counts[max(range(len(sizes)), key=lambda part: sizes[part] / counts[part])] += 1
    return [range(begin, end) for begin, end in runs_of(counts)]


def runs_of(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Runs [begin, end) of these sizes, one after the other."""
    return list(pairwise([0, *accumulate(sizes)]))


def equal_runs(costs: Tensor, count: int) -> list[tuple[int, int]]:
    """Cut rows into runs [begin, end) of about equal cost, (N,) each row's."""
    reached = costs.cumsum(0)
    goals = torch.arange(1, count) * int(costs.sum()) // count
    return list(pairwise([0, *torch.searchsorted(reached, goals, right=True).tolist(), len(costs)]))
