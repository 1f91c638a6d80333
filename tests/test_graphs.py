"""The graphs of the tests: what the builders promise about IDs, orders and features, checked edge by edge."""

import pytest
import torch

from sar.common_tuples import EID, NID, ORIG_ID
from tests.graphs import partition_in_memory, random_graph


@pytest.mark.parametrize("count", [1, 2, 4])
def test_partitions_are_of_the_graph(count):
    graph = random_graph(3, num_nodes=30, num_edges=150, isolated=3, no_in_edges=4)
    assignment = torch.randint(0, count, (30,), generator=torch.Generator().manual_seed(5))
    weights, features = torch.rand(150, 2), torch.rand(30, 3)
    parts = partition_in_memory(graph, assignment, count, {"w": weights}, {"h": features})
    seen, first_edge = [], 0
    for rank, partition in enumerate(parts.partitions):
        start, end = partition.node_ranges[rank]
        assert partition.node_features[NID].tolist() == list(range(start, end))
        own = partition.node_features[ORIG_ID]
        assert torch.equal(own, parts.node_ids[start:end])
        assert (assignment[own] == rank).all()
        assert torch.equal(partition.node_features["_N/h"], features[own])
        keys = []  # of the visible order: source partition, destination, edge ID
        for source_rank, shard in enumerate(partition.all_shard_edges):
            src, dst = (parts.node_ids[ids] for ids in shard.edges)
            original = shard.edge_features[ORIG_ID]
            assert torch.equal(src, graph.src[original])
            assert torch.equal(dst, graph.dst[original])
            assert (assignment[src] == source_rank).all()
            assert (assignment[dst] == rank).all()
            assert torch.equal(shard.edge_features["w"], weights[original])
            seen.append(original)
            ends, ids = shard.edges[1].tolist(), shard.edge_features[EID].tolist()
            keys += [(source_rank, *pair) for pair in zip(ends, ids, strict=True)]
        assert keys == sorted(keys)
        assert sorted(key[2] for key in keys) == list(range(first_edge, first_edge + len(keys)))
        first_edge += len(keys)
    assert torch.cat(seen).sort().values.tolist() == list(range(len(graph.src)))
    assert torch.equal(torch.cat(seen), parts.edge_ids)
    src, dst = parts.reference().edges(order="eid")
    shards = [shard.edges for partition in parts.partitions for shard in partition.all_shard_edges]
    assert torch.equal(src, torch.cat([shard[0] for shard in shards]))
    assert torch.equal(dst, torch.cat([shard[1] for shard in shards]))


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("multi", [True, False])
def test_random_graphs_have_what_was_asked_for(loops, multi):
    graph = random_graph(1, 40, 200, self_loops=loops, multi_edges=multi, isolated=5, no_in_edges=6)
    assert bool((graph.src == graph.dst).any()) == loops
    pairs = set(zip(graph.src.tolist(), graph.dst.tolist(), strict=True))
    assert (len(pairs) < len(graph.src)) == multi
    assert int(graph.dst.max()) < 29 <= int(graph.src.max()) < 35
