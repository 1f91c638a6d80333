"""Small partitioned graphs for tests of seeds, and dealing with what workers return."""

from typing import Any

import torch
from torch import Tensor

from tests.graphs import PartitionedGraph, partition_in_memory, random_graph
from tests.hetero_graphs import HeteroParts, heterograph, partition_hetero

BUYS, BOUGHT, FOLLOWS = ("user", "buys", "item"), ("item", "bought by", "user"), ("user", "follows", "user")


def parts_of(node_counts: list[int], edges_per_node: int = 3) -> PartitionedGraph:
    """A graph whose partitions have these numbers of nodes; global IDs are original IDs."""
    count = sum(node_counts)
    assignment = torch.repeat_interleave(torch.tensor(node_counts))
    return partition_in_memory(random_graph(0, count, edges_per_node * count), assignment, len(node_counts))


def typed_graph() -> Any:
    """Users follow each other and buy items; items are bought by them, edge for edge; some several times."""
    generator = torch.Generator().manual_seed(3)
    users, items = torch.randint(14, (40,), generator=generator), torch.randint(9, (40,), generator=generator)
    users[30:], items[30:] = users[:10], items[:10]
    follows = torch.randint(14, (2, 40), generator=generator)
    graph = heterograph(
        {FOLLOWS: (follows[0], follows[1]), BUYS: (users, items), BOUGHT: (items, users)},
        {"item": 9, "user": 14},
    )
    graph.edges[BUYS].data["stars"] = torch.arange(40) % 5
    return graph


def typed_parts(num_partitions: int) -> HeteroParts:
    """That graph in partitions; the last one has no items if there are several."""
    assignment = {"user": torch.arange(14) % num_partitions, "item": torch.arange(9) % max(1, num_partitions - 1)}
    return partition_hetero(typed_graph(), assignment, num_partitions)


def global_ids(parts: HeteroParts, ntype: str) -> list[Tensor]:
    """The global IDs of each worker's nodes of a type."""
    kind = parts.partitions[0].node_type_names.index(ntype)
    return [p.node_features["_ID"][p.node_features["_TYPE"] == kind] for p in parts.partitions]
