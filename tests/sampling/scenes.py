"""Small partitioned graphs for tests of seeds, and dealing with what workers return."""

import torch
from torch import Tensor

from tests.graphs import PartitionedGraph, partition_in_memory, random_graph
from tests.hetero_graphs import HeteroParts, partition_hetero


def parts_of(node_counts: list[int], edges_per_node: int = 3) -> PartitionedGraph:
    """A graph whose partitions have these numbers of nodes; global IDs are original IDs."""
    count = sum(node_counts)
    assignment = torch.repeat_interleave(torch.tensor(node_counts))
    return partition_in_memory(random_graph(0, count, edges_per_node * count), assignment, len(node_counts))


def typed_parts(num_partitions: int) -> HeteroParts:
    """Users that follow each other and buy items; the last partition has no items where there are several."""
    import dgl

    generator = torch.Generator().manual_seed(3)

    def ends(sources: int, destinations: int, count: int) -> tuple[Tensor, Tensor]:
        return (
            torch.randint(sources, (count,), generator=generator),
            torch.randint(destinations, (count,), generator=generator),
        )

    graph = dgl.heterograph(
        {
            ("user", "follows", "user"): ends(14, 14, 40),
            ("user", "buys", "item"): ends(14, 9, 30),
            ("item", "bought by", "user"): ends(9, 14, 30),
        },
        num_nodes_dict={"item": 9, "user": 14},
    )
    assignment = {"user": torch.arange(14) % num_partitions, "item": torch.arange(9) % max(1, num_partitions - 1)}
    return partition_hetero(graph, assignment, num_partitions)


def global_ids(parts: HeteroParts, ntype: str) -> list[Tensor]:
    """The global IDs of each worker's nodes of a type."""
    kind = parts.partitions[0].node_type_names.index(ntype)
    return [p.node_features["_ID"][p.node_features["_TYPE"] == kind] for p in parts.partitions]
