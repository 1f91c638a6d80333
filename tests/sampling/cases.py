"""What tests of sampling share: features that name their row, and blocks described by plain tensors."""

from typing import Any

import dgl
import torch
from torch import Tensor

import sar
from sar.common_tuples import PartitionData
from tests.graphs import PartitionedGraph

Described = list[dict[str, Any]]


def describe(blocks: list[Any]) -> Described:
    """All of homogeneous blocks: nodes, edges as global IDs, and fields."""
    return [
        {
            "src": dict(block.srcdata),
            "dst": dict(block.dstdata),
            "edges": [end.clone() for end in block.edges(order="eid")],
            "edata": dict(block.edata),
            "is_block": block.is_block,
        }
        for block in blocks
    ]


def node_features(partition: PartitionData) -> Tensor:
    """Of own nodes, (N_i, 3): made of their global IDs."""
    start, end = partition.node_ranges[sar.rank()]
    return features_of(torch.arange(start, end))


def features_of(ids: Tensor) -> Tensor:
    return torch.stack([ids, 2 * ids + 1, -ids], 1).double()


def edge_features_of(ids: Tensor) -> Tensor:
    return torch.stack([ids.float(), -ids.float()], 1)


def add_edge_feature(graph: Any) -> None:
    graph.edata["e"] = edge_features_of(graph.edata[dgl.EID])


def all_edges(parts: PartitionedGraph) -> dict[int, tuple[int, int]]:
    """Source and destination of every edge ID."""
    ids = torch.cat([s.edge_features["_ID"] for p in parts.partitions for s in p.all_shard_edges])
    return {int(e): (int(u), int(v)) for e, u, v in zip(ids, parts.src, parts.dst, strict=True)}


def check_blocks(
    parts: PartitionedGraph, described: Described, seeds: Tensor, fanouts: list[int], replace: bool
) -> None:
    """Seeds first, layers that fit together, true edges, as many as asked for, and right features."""
    edges = all_edges(parts)
    degrees = parts.reference().in_degrees()
    assert torch.equal(described[-1]["dst"][dgl.NID], seeds)
    for layer, (block, fanout) in enumerate(zip(described, fanouts, strict=True)):
        src, dst = block["src"][dgl.NID], block["dst"][dgl.NID]
        assert block["is_block"]
        assert torch.equal(src[: len(dst)], dst)
        assert len(src.unique()) == len(src)
        if layer:
            assert torch.equal(described[layer - 1]["dst"][dgl.NID], src)
        u, v = block["edges"]
        ids = block["edata"][dgl.EID]
        for edge, source, destination in zip(ids.tolist(), src[u].tolist(), dst[v].tolist(), strict=True):
            assert edges[edge] == (source, destination)
        found = torch.bincount(v, minlength=len(dst))
        available = degrees[dst]
        wanted = available if fanout == -1 else available.clamp(max=fanout)
        if replace and fanout != -1:
            wanted = fanout * (available > 0)
        assert torch.equal(found, wanted)
        if not replace or fanout == -1:
            assert len(ids.unique()) == len(ids)
        assert torch.equal(block["edata"]["e"], edge_features_of(ids))
        assert set(src[len(dst) :].tolist()) <= set(src[u].tolist())
    assert torch.equal(described[0]["src"]["x"], features_of(described[0]["src"][dgl.NID]))
    assert torch.equal(described[-1]["dst"]["y"], features_of(seeds))


def same(a: Any, b: Any) -> bool:
    """Whether two nests of dictionaries and lists have equal tensors."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
