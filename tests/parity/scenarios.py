"""Named graphs with named ways to cut them, for any number of workers."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.graphs import EdgeList, PartitionedGraph, partition_in_memory, random_graph


def scattered(num_nodes: int, num_partitions: int, seed: int = 0) -> Tensor:
    return torch.randint(0, num_partitions, (num_nodes,), generator=torch.Generator().manual_seed(seed))


def _random(workers: int) -> PartitionedGraph:
    return partition_in_memory(random_graph(1, 40, 240), scattered(40, workers), workers)


def _isolated(workers: int) -> PartitionedGraph:
    graph = random_graph(2, 30, 90, isolated=8, no_in_edges=7)
    return partition_in_memory(graph, scattered(30, workers), workers)


def _first_worker_without_nodes(workers: int) -> PartitionedGraph:
    assignment = scattered(25, max(workers - 1, 1)) + (workers > 1)
    return partition_in_memory(random_graph(3, 25, 120), assignment, workers)


def _all_on_the_last_worker(workers: int) -> PartitionedGraph:
    assignment = torch.full((20,), workers - 1)
    return partition_in_memory(random_graph(4, 20, 80), assignment, workers)


def _ring_of_partitions(workers: int) -> PartitionedGraph:
    """Edges only from each partition to the next: local shards and most others are empty."""
    assignment = torch.arange(24) % workers
    graph = random_graph(5, 24, 400, multi_edges=False)
    keep = assignment[graph.dst] == (assignment[graph.src] + 1) % workers
    return partition_in_memory(EdgeList(graph.src[keep], graph.dst[keep], 24), assignment, workers)


def _no_cut_edge(workers: int) -> PartitionedGraph:
    assignment = torch.arange(24) % workers
    graph = random_graph(6, 24, 300)
    keep = assignment[graph.dst] == assignment[graph.src]
    return partition_in_memory(EdgeList(graph.src[keep], graph.dst[keep], 24), assignment, workers)


def _star(workers: int) -> PartitionedGraph:
    """Every edge ends in node 0, so all workers but one have no in-edge."""
    src = torch.arange(20)
    return partition_in_memory(EdgeList(src, torch.zeros_like(src), 20), scattered(20, workers), workers)


def _one_node(workers: int) -> PartitionedGraph:
    loop = torch.zeros(1, dtype=torch.int64)
    return partition_in_memory(EdgeList(loop, loop, 1), torch.tensor([workers - 1]), workers)


def _no_edges(workers: int) -> PartitionedGraph:
    none = torch.empty(0, dtype=torch.int64)
    return partition_in_memory(EdgeList(none, none, 7), scattered(7, workers), workers)


SCENARIOS: dict[str, Callable[[int], PartitionedGraph]] = {
    "random": _random,
    "isolated": _isolated,
    "first worker without nodes": _first_worker_without_nodes,
    "all on the last worker": _all_on_the_last_worker,
    "ring of partitions": _ring_of_partitions,
    "no cut edge": _no_cut_edge,
    "star": _star,
    "one node": _one_node,
    "no edges": _no_edges,
}
