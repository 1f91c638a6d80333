"""The graph builders: what they promise about IDs, orders and features, checked edge by edge."""

import pytest
import torch

from sar.common_tuples import EID, NID, ORIG_ID
from tests.graphs import partition_in_memory, random_graph


@pytest.fixture(params=[1, 2, 4])
def cut(request):
    graph = random_graph(3, num_nodes=30, num_edges=150, isolated=3, no_in_edges=4)
    assignment = torch.randint(0, request.param, (30,), generator=torch.Generator().manual_seed(5))
    weights = torch.rand(150, 2)
    features = torch.rand(30, 3)
    return (
        graph,
        assignment,
        weights,
        features,
        partition_in_memory(graph, assignment, request.param, {"w": weights}, {"h": features}),
    )


def test_every_edge_is_with_its_destination_once(cut):
    graph, assignment, weights, _, parts = cut
    seen = []
    for rank, partition in enumerate(parts.partitions):
        for source_rank, shard in enumerate(partition.all_shard_edges):
            src, dst = (parts.node_ids[ids] for ids in shard.edges)
            original = shard.edge_features[ORIG_ID]
            assert torch.equal(src, graph.src[original])
            assert torch.equal(dst, graph.dst[original])
            assert (assignment[src] == source_rank).all()
            assert (assignment[dst] == rank).all()
            assert torch.equal(shard.edge_features["w"], weights[original])
            seen.append(original)
    assert torch.cat(seen).sort().values.tolist() == list(range(len(graph.src)))
    assert torch.equal(torch.cat(seen), parts.edge_ids)


def test_nodes_are_partition_major(cut):
    _, assignment, _, features, parts = cut
    for rank, partition in enumerate(parts.partitions):
        start, end = partition.node_ranges[rank]
        assert partition.node_features[NID].tolist() == list(range(start, end))
        original = partition.node_features[ORIG_ID]
        assert torch.equal(original, parts.node_ids[start:end])
        assert (assignment[original] == rank).all()
        assert torch.equal(partition.node_features["_N/h"], features[original])
    assert parts.partitions[0].node_ranges[-1][1] == 30


def test_edges_are_visible_by_source_partition_destination_and_edge_id(cut):
    *_, parts = cut
    first_edge = 0
    for partition in parts.partitions:
        keys = []
        for source_rank, shard in enumerate(partition.all_shard_edges):
            ends, ids = shard.edges[1].tolist(), shard.edge_features[EID].tolist()
            keys += [(source_rank, *pair) for pair in zip(ends, ids, strict=True)]
        assert keys == sorted(keys)
        edge_ids = sorted(key[2] for key in keys)
        assert edge_ids == list(range(first_edge, first_edge + len(keys)))
        first_edge += len(keys)


def test_the_reference_graph_lists_edges_in_the_visible_order(cut):
    *_, parts = cut
    src, dst = parts.reference().edges(order="eid")
    shards = [shard.edges for partition in parts.partitions for shard in partition.all_shard_edges]
    assert torch.equal(src, torch.cat([shard[0] for shard in shards]))
    assert torch.equal(dst, torch.cat([shard[1] for shard in shards]))
    assert [len(rows) for rows in parts.split_edges(src)] == parts.edge_counts
    assert torch.cat(parts.split_nodes(parts.node_ids)).tolist() == parts.node_ids.tolist()


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("multi", [True, False])
def test_random_graphs_have_what_was_asked_for(loops, multi):
    graph = random_graph(1, 40, 200, self_loops=loops, multi_edges=multi, isolated=5, no_in_edges=6)
    assert bool((graph.src == graph.dst).any()) == loops
    pairs = set(zip(graph.src.tolist(), graph.dst.tolist(), strict=True))
    assert (len(pairs) < len(graph.src)) == multi
    assert int(graph.dst.max()) < 29 <= int(graph.src.max()) < 35


@pytest.mark.parametrize("graph", [random_graph(0, 0, 5), random_graph(0, 1, 0), random_graph(0, 3, 9, isolated=3)])
def test_graphs_without_edges(graph):
    parts = partition_in_memory(graph, torch.zeros(graph.num_nodes, dtype=torch.int64), 2)
    assert parts.edge_counts == [0, 0]
    assert parts.node_counts == [graph.num_nodes, 0]
    assert [len(partition.all_shard_edges) for partition in parts.partitions] == [2, 2]
