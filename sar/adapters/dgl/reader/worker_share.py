"""Which nodes of a partitioned graph each worker owns, whatever the number of workers.

With as many partitions as workers, worker r owns partition r; with more, consecutive partitions with about equally many
edges; with fewer, the workers of a partition divide its nodes in runs of about equally many nodes and edges into them.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from sar.adapters.dgl.reader.local_graph import DST, LocalGraph, PartFile, check_node_ids
from sar.adapters.dgl.reader.partition_json import PartitionJson, graph_path
from sar.comm.group import Group
from sar.core.regroup import deal_parts, deal_workers, equal_runs
from sar.errors import PartitionError


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


def chosen_share(spec: PartitionJson, parts: Sequence[int], group: Group) -> tuple[list[int], WorkerShare]:
    """A worker's share where every worker names its partitions, if any; called by all workers together.

    Returns:
        All partitions in the order of the workers that have them, and the share, in IDs that count in this order. The
        share of a worker without partitions is no nodes of the first one.

    Raises:
        PartitionError: there is no such partition, or not each is with one worker.
    """
    own = torch.tensor(list(parts), dtype=torch.int64)
    if not bool(((own >= 0) & (own < spec.num_parts)).all()):
        raise PartitionError(f"parts is {list(parts)}; expected some of 0 to {spec.num_parts - 1}, as in {spec.path}.")
    mine = own.bincount(minlength=spec.num_parts) * (1 + group.rank)
    owners = torch.stack(group.all_gather(mine, "parts"))
    taken = (owners > 0).sum(0)
    if not bool((taken == 1).all()) or len(own) != int((mine > 0).sum()):
        raise PartitionError(
            f"The partitions 0 to {spec.num_parts - 1} are with {taken.tolist()} workers each, and this worker chose "
            f"{list(parts)}; expected each with one worker, once."
        )
    order: list[int] = owners.sum(0).argsort(stable=True).tolist()
    sizes = [spec.partition_ranges[part][1] - spec.partition_ranges[part][0] for part in order]
    bounds = list(accumulate(sizes, initial=0))
    first = int((owners.sum(0) <= group.rank).sum())  # partitions of the workers before this one
    last = first + len(own)
    return order, WorkerShare(order[first:last] or order[:1], bounds[first], bounds[last])
