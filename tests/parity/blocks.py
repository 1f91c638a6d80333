"""Message flow graphs for tests: seeds, DGL's blocks to compare with, and the rows of the whole graph they take."""

from typing import Any, NamedTuple

import dgl
import torch
from torch import Tensor

import sar
from tests.graphs import PartitionedGraph
from tests.parity.harness import Data


def some_seeds(parts: PartitionedGraph, how: str) -> list[Tensor]:
    """Global IDs by worker, in no order."""
    generator = torch.Generator().manual_seed(2)
    seeds = []
    for rank, ids in enumerate(parts.split_nodes(torch.arange(parts.num_nodes))):
        last = rank == len(parts.partitions) - 1
        count = {"few": 3, "uneven": 1 + 6 * rank, "not the first": 6 * rank, "last only": 5 * last, "all": len(ids)}
        seeds.append(ids[torch.randperm(len(ids), generator=generator)[: count[how]]])
    return seeds


def reference_blocks(graph: Any, seeds: Tensor, num_layers: int) -> list[Any]:
    """DGL's blocks of the whole graph; the field `edge` tells which of its edges each one is."""
    blocks: list[Any] = []
    for _ in range(num_layers):
        subgraph = dgl.in_subgraph(graph, seeds)
        block = dgl.to_block(subgraph, seeds)
        block.edata["edge"] = subgraph.edata[dgl.EID][block.edata[dgl.EID]]
        seeds = block.srcdata[dgl.NID]
        blocks.insert(0, block)
    return blocks


class Part(NamedTuple):
    """A graph to call a layer on, and the rows of the features that belong to it.

    graph: a whole graph, or the message flow graph of one layer.
    src: rows of its sources, (N_src,).
    dst: rows of its destinations, (N_dst,).
    edges: rows of its edges, (E,).
    """

    graph: Any
    src: Tensor
    dst: Tensor
    edges: Tensor

    def take(self, data: Data) -> Data:
        """Features of the sources and of the edges."""
        nodes = {name: rows[self.src] for name, rows in data.nodes.items()}
        return Data(nodes, {name: rows[self.edges] for name, rows in data.edges.items()})


def whole(graph: Any) -> Part:
    nodes, edges = (torch.arange(count, device=graph.device) for count in (graph.num_nodes(), graph.num_edges()))
    return Part(graph, nodes, nodes, edges)


def block_of(graph: Any, data: Data, seeds: Tensor) -> Part:
    """The message flow graph of one layer into `seeds`, global IDs; in DGL or, in the graph's mode, of this worker."""
    if data.partition is None:
        (block,) = reference_blocks(graph, seeds, 1)
        return Part(block, block.srcdata[dgl.NID], seeds, block.edata["edge"])
    start, end = data.partition.node_ranges[sar.rank()]
    seeds = seeds[(seeds >= start) & (seeds < end)]
    (block,) = sar.construct_mfgs(data.partition, seeds, 1)
    if graph.one_shot:
        block = block.get_full_partition_graph()
    ids, rows = graph.edata["_ID"].sort()
    return Part(block, block.input_nodes, seeds - start, rows[torch.searchsorted(ids, block.edata["_ID"])])
