"""`sampling_graph`: a worker's edges and their ends as an ordinary graph of DGL, and what is sampled from it."""

import dgl
import pytest
import torch

from tests.hetero_graphs import COUNTS, RELATIONS, partition_hetero, whole_graph
from tests.parity.harness import build
from tests.parity.scenarios import SCENARIOS, scattered


def describe(local):
    """All of a local graph in global IDs: its nodes, and edges by type."""
    nodes = {t: (local.nodes[t].data[dgl.NID], local.nodes[t].data["inner_node"]) for t in local.ntypes}
    edges = {}
    for source, name, destination in local.canonical_etypes:
        src, dst = local.edges(etype=(source, name, destination), order="eid")
        columns = dict(local.edges[source, name, destination].data)
        edges[source, name, destination] = (nodes[source][0][src], nodes[destination][0][dst], columns)
    return nodes, edges


def sampling_graph(partition, mode):
    graph = build(partition, mode)
    local = graph.sampling_graph
    graph.edata["late"] = torch.arange(graph.num_edges()) * 2
    return (
        describe(graph.sampling_graph),
        "late" in local.edata,
        describe(local.sample_neighbors(torch.arange(graph.num_nodes()), -1)) if graph.num_edges() else None,
        graph.sampling_graph._graph is local._graph,
    )


@pytest.mark.parametrize("mode", [1, 3])
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_own_nodes_halo_and_edges(pool, world_size, scenario, mode):
    parts = SCENARIOS[scenario](world_size)
    first = 0
    results = pool.run(sampling_graph, mode, per_rank=parts.partitions)
    for rank, ((nodes, edges), is_shared, sampled, is_kept) in enumerate(results):
        own = torch.arange(*parts.partitions[rank].node_ranges[rank])
        rows = slice(first, first + parts.edge_counts[rank])
        first = rows.stop
        src, dst = parts.src[rows], parts.dst[rows]
        halo = src[~torch.isin(src, own)].unique()
        ((ids, inner),) = nodes.values()
        assert torch.equal(ids, torch.cat([own, halo]))
        assert inner.dtype == torch.bool
        assert inner.tolist() == [True] * len(own) + [False] * len(halo)
        (found,) = edges.values()
        assert torch.equal(found[0], src)
        assert torch.equal(found[1], dst)
        shards = parts.partitions[rank].all_shard_edges
        assert torch.equal(found[2][dgl.EID], torch.cat([shard.edge_features["_ID"] for shard in shards]))
        assert torch.equal(found[2]["late"], 2 * torch.arange(len(src)))
        assert not is_shared
        assert is_kept
        if sampled is not None:
            ((some_src, some_dst, columns),) = sampled[1].values()
            # DGL's `_ID` of what it samples is the place in the graph that it sampled from.
            assert torch.equal(some_src, src[columns[dgl.EID]])
            assert torch.equal(some_dst, dst[columns[dgl.EID]])
            assert sorted(columns[dgl.EID].tolist()) == list(range(len(src)))


def some_assignment(workers):
    """Authors are on the last worker alone."""
    assignment = {t: scattered(count, workers) for t, count in COUNTS.items()}
    assignment["author"] = torch.full((COUNTS["author"],), workers - 1)
    return assignment


def typed_sampling_graph(partition, mode):
    graph = build(partition, mode)
    view = graph["cites"].sampling_graph
    own = {"paper": torch.arange(graph.num_nodes("paper"))}
    sampled = dgl.sampling.sample_neighbors(graph.sampling_graph, own, 2)
    degrees = {etype: (graph.in_degrees(etype=etype), sampled.in_degrees(etype=etype)) for etype in RELATIONS}
    return describe(graph.sampling_graph), describe(view), degrees


@pytest.mark.parametrize("mode", [1, 3])
@pytest.mark.parametrize("world_size", [2])
def test_several_types(pool, world_size, mode):
    graph = whole_graph()
    parts = partition_hetero(graph, some_assignment(world_size), world_size)
    results = pool.run(typed_sampling_graph, mode, per_rank=parts.partitions)
    new_id = {
        t: torch.cat([p.node_features["_ID"][p.node_features["_TYPE"] == kind] for p in parts.partitions])
        for kind, t in enumerate(graph.ntypes)
    }
    original = {t: dict(zip(new_id[t].tolist(), parts.node_ids[t].tolist(), strict=True)) for t in graph.ntypes}
    for etype in RELATIONS:
        source, _, destination = etype
        found = [edges[etype] for (_, edges), _, _ in results]
        ids = parts.edge_ids[etype]
        src, dst = graph.find_edges(ids, etype=etype)
        assert [original[source][node] for part in found for node in part[0].tolist()] == src.tolist()
        assert [original[destination][node] for part in found for node in part[1].tolist()] == dst.tolist()
        assert torch.equal(torch.cat([part[2]["orig_id"] for part in found]), ids)
        assert torch.equal(torch.cat([part[2]["w"] for part in found]), graph.edges[etype].data["w"][ids])
    for rank, ((nodes, edges), (view_nodes, view_edges), degrees) in enumerate(results):
        start, end = parts.partitions[rank].node_ranges[rank]
        for ntype, (ids, inner) in nodes.items():
            assert torch.equal(inner, (ids >= start) & (ids < end))
            read = [ends[0] for etype, ends in edges.items() if etype[0] == ntype]
            needed = torch.cat([ids[inner], *read]).unique()
            assert torch.equal(ids.sort().values, needed), "nothing beyond own nodes and what they read"
        cites = ("paper", "cites", "paper")
        assert list(view_edges) == [cites]
        assert torch.equal(view_nodes["paper"][0], nodes["paper"][0])
        assert all(torch.equal(view_edges[cites][end], edges[cites][end]) for end in (0, 1))
        for etype, (all_edges, some) in degrees.items():
            own = some[: len(all_edges)]
            assert torch.equal(own, all_edges.clamp(max=2) if etype[2] == "paper" else torch.zeros_like(own))
