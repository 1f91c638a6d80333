"""Subgraphs of clusters and of random draws: edges of DGL's induced subgraphs, draws and weights of GraphSAINT."""

import itertools
import math

import dgl
import numpy as np
import pytest
import torch

import sar
from sar.errors import ConfigError
from sar.sampling import saint
from tests.graphs import EdgeList, partition_in_memory, random_graph
from tests.matrix import THREAD, corner
from tests.parity.scenarios import SCENARIOS
from tests.sampling.cases import add_edge_feature, all_edges, edge_features_of, features_of, node_features
from tests.sampling.scenes import typed_parts
from tests.sampling.test_distribution import assert_same_distribution

MODES = {"node": 6, "edge": 5, "walk": (3, 4)}


def clusters_of(ids):
    """Five clusters, of which one may be empty, across all workers."""
    return ids * 7 % 11 % 5


def make_sampler(graph, kind, features):
    options = {"input_node_features": {"x": features}, "output_node_features": {"y": -features}}
    if kind == "metis":
        return sar.ClusterGCNSampler(graph, 3, **options)
    if kind == "clusters":
        clusters = clusters_of(graph.node_ids())
        sampler = sar.ClusterGCNSampler(graph, 5, clusters, **options)
        clusters.zero_()  # which is the caller's
        return sampler
    return sar.SAINTSampler(kind, MODES[kind], coverage=2, **options)


def load(partition, kind, num_workers=0):
    """Two epochs, as plain tensors, and the seeds."""
    graph = sar.construct_full_graph(partition)
    add_edge_feature(graph)
    sampler = make_sampler(graph, kind, node_features(partition))
    seeds = sampler.cluster_ids if kind in ("metis", "clusters") else torch.arange(3)
    loader = sar.DataLoader(graph, seeds, sampler, 2, shuffle=True, seed=4, num_workers=num_workers)
    epochs = [
        [(dict(sub.ndata), dict(sub.edata), [end.clone() for end in sub.edges(order="eid")]) for sub in loader]
        for _ in range(2)
    ]
    return epochs, seeds, getattr(sampler, "_numbers", None)


def check_subgraph(parts, subgraph):
    """The nodes in order, all edges of DGL's subgraph of these nodes, and right features."""
    ndata, edata, (src, dst) = subgraph
    nodes = ndata[dgl.NID]
    assert torch.equal(nodes, nodes.unique())
    expected = dgl.node_subgraph(parts.reference(), nodes).edata[dgl.EID]
    ids = torch.cat([shard.edge_features["_ID"] for p in parts.partitions for shard in p.all_shard_edges])
    assert torch.equal(edata[dgl.EID].sort().values, ids[expected].sort().values)
    edges = all_edges(parts)
    for edge, u, v in zip(edata[dgl.EID].tolist(), nodes[src].tolist(), nodes[dst].tolist(), strict=True):
        assert edges[edge] == (u, v)
    assert torch.equal(edata["e"], edge_features_of(edata[dgl.EID]))
    assert torch.equal(ndata["x"], features_of(nodes))
    assert torch.equal(ndata["y"], -features_of(nodes))


@pytest.mark.parametrize("kind", ["metis", "clusters", *MODES])
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("world_size", [corner(1), corner(2), 3])
def test_subgraphs_of_every_graph(pool, world_size, scenario, kind):
    parts = SCENARIOS[scenario](world_size)
    results = pool.run(load, kind, per_rank=parts.partitions)
    assert len({len(epochs[0]) for epochs, _, _ in results}) == 1
    for epochs, _, _ in results:
        for subgraph in itertools.chain(*epochs):
            check_subgraph(parts, subgraph)
    seeds = torch.cat([seeds for _, seeds, _ in results])
    if kind in MODES:
        most = {"node": 6, "edge": 10, "walk": 15}[kind]
        for epochs, _, _ in results:
            sizes = [len(ndata[dgl.NID]) for ndata, _, _ in epochs[0]]
            assert max(sizes) <= most
            assert min(sizes) >= (len(parts.src) > 0 or kind != "edge")
        return
    assert torch.equal(seeds.sort().values, torch.arange(5 if kind == "clusters" else 3 * world_size))
    numbers = torch.cat([numbers for _, _, numbers in results])
    for number in range(2):
        together = [ndata[dgl.NID] for epochs, _, _ in results for ndata, _, _ in epochs[number]]
        assert torch.equal(torch.cat(together).sort().values, torch.arange(parts.num_nodes))
        for nodes in together:  # whole clusters, two at most
            assert torch.equal(torch.isin(numbers, numbers[nodes]).nonzero().squeeze(1), nodes)
            assert len(numbers[nodes].unique()) <= 2
    if kind == "clusters":
        assert torch.equal(numbers, clusters_of(torch.arange(parts.num_nodes)))
        for (_, mine, _), partition in zip(results, parts.partitions, strict=True):
            counts = [torch.bincount(clusters_of(torch.arange(*r)), minlength=5) for r in partition.node_ranges]
            rank = [p is partition for p in parts.partitions].index(True)
            assert all(counts[rank][c] == torch.stack(counts)[:, c].max() for c in mine.tolist())


@pytest.mark.parametrize("world_size", [1])
def test_metis_clusters_are_communities(pool, world_size):
    """Cliques of six, mixed up: each is a cluster."""
    pairs = torch.cartesian_prod(torch.arange(6), torch.arange(6))
    edges = torch.cat([pairs[pairs[:, 0] != pairs[:, 1]] + 6 * k for k in range(4)])
    name = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    parts = partition_in_memory(EdgeList(name[edges[:, 0]], name[edges[:, 1]], 24), torch.zeros(24).long(), world_size)
    [numbers] = pool.run(metis_numbers, per_rank=parts.partitions)
    assert {frozenset((numbers == k).nonzero().squeeze(1).tolist()) for k in range(4)} == {
        frozenset(name[6 * k : 6 * k + 6].tolist()) for k in range(4)
    }


def metis_numbers(partition):
    return sar.ClusterGCNSampler(sar.construct_full_graph(partition), 4)._numbers


@pytest.mark.slow
@THREAD
@pytest.mark.parametrize("kind", [corner("clusters"), "walk"])
@pytest.mark.parametrize("world_size", [corner(1), 2, corner(3)])
def test_same_subgraphs_with_processes(pool, world_size, kind):
    partitions = SCENARIOS["random"](world_size).partitions
    without, again = (pool.run(load, kind, per_rank=partitions) for _ in range(2))
    with_processes = pool.run(load, kind, 1, per_rank=partitions, timeout=200)
    for other in (again, with_processes):
        for (epochs, _, _), (expected, _, _) in zip(other, without, strict=True):
            for found, wanted in zip(itertools.chain(*epochs), itertools.chain(*expected), strict=True):
                assert all(torch.equal(found[k][name], wanted[k][name]) for k in (0, 1) for name in wanted[k])
                assert all(map(torch.equal, found[2], wanted[2]))
    first, second = ([batches[0][dgl.NID] for epochs, _, _ in without for batches in epochs[k]] for k in (0, 1))
    assert kind == "clusters" or not all(map(torch.equal, first, second))  # of few clusters the order may be the same


SMALL = EdgeList(torch.tensor([0, 0, 1, 1, 2, 3, 3, 4]), torch.tensor([1, 1, 0, 2, 2, 1, 4, 0]), 6)
"""Parallel edges, a pair in both directions, loops, an edge without a way back, and a node without edges."""


def draw_small(partition, mode, budget, count):
    """Node sets, and the weights of all nodes and edges that came up, by ID."""
    torch.set_default_dtype(torch.float64)
    graph = sar.construct_full_graph(partition)
    sampler = sar.SAINTSampler(mode, budget, coverage=0)
    sets, loss, aggregator = [], {}, {}
    for sub in sar.DataLoader(graph, torch.arange(count), sampler, seed=1):
        sets.append(sub.ndata[dgl.NID])
        if mode != "walk":
            loss |= dict(zip(sub.ndata[dgl.NID].tolist(), sub.ndata["loss_weight"].tolist(), strict=True))
            weights = sub.edata["aggregator_weight"].tolist()
            aggregator |= dict(zip(sub.edata[dgl.EID].tolist(), weights, strict=True))
        else:
            assert "loss_weight" not in sub.ndata
            assert "aggregator_weight" not in sub.edata
    return sets, loss, aggregator


def items_of(parts, mode):
    """What is drawn in one draw, and how likely: sets of nodes, and probabilities."""
    reference = parts.reference()
    if mode == "node":
        weights = reference.out_degrees().clamp(min=1).double()
        return [{v} for v in range(parts.num_nodes)], weights / weights.sum()
    src, dst = parts.src, parts.dst
    weights = 1 / reference.in_degrees()[dst].double() + 1 / reference.out_degrees()[src].double()
    return list(map(set, zip(src.tolist(), dst.tolist(), strict=True))), weights / weights.sum()


def probabilities_of_sets(parts, mode, draws):
    """Of all sets of nodes that a subgraph may have."""
    items, probability = items_of(parts, mode)
    found = {}
    for chosen in itertools.product(range(len(items)), repeat=draws):
        nodes = frozenset().union(*(items[i] for i in chosen))
        found[nodes] = found.get(nodes, 0) + math.prod(probability[i].item() for i in chosen)
    return found


@pytest.mark.parametrize("mode", ["node", "edge"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_exact_weights_are_those_of_all_outcomes(pool, world_size, mode):
    draws = 3
    parts = partition_in_memory(SMALL, torch.arange(6) * 2 % world_size, world_size)
    outcomes = probabilities_of_sets(parts, mode, draws)

    def likely(*nodes):
        return sum(p for members, p in outcomes.items() if members.issuperset(nodes))

    edges, seen_nodes, seen_edges = all_edges(parts), set(), set()
    for _, loss, aggregator in pool.run(draw_small, mode, draws, 60, per_rank=parts.partitions):
        for node, weight in loss.items():
            assert weight == pytest.approx(1 / likely(node), rel=1e-9)
        for edge, weight in aggregator.items():
            assert weight == pytest.approx(likely(edges[edge][1]) / likely(*edges[edge]), rel=1e-9)
        seen_nodes |= loss.keys()
        seen_edges |= aggregator.keys()
    assert len(seen_nodes) == (6 if mode == "node" else 5)
    assert len(seen_edges) == 8


def test_exact_weights_of_large_graphs_do_not_cancel():
    """With n draws of q = 1e-9 each, p_uv is n (n - 1) q^2 but for terms of higher order."""
    once, draws = torch.tensor([1e-9], dtype=torch.float64), 100
    product = saint.both_drawn(once, once, torch.zeros_like(once), draws)
    assert product.item() == pytest.approx(draws * (draws - 1) * 1e-18, rel=1e-6)


@pytest.mark.parametrize("mode", [corner("node"), corner("edge"), corner("walk")])
@pytest.mark.parametrize("world_size", [2])
def test_subgraphs_are_distributed_as_dgl_s(pool, world_size, mode):
    count, budget = 400, {"node": 3, "edge": 2, "walk": (2, 2)}[mode]
    parts = partition_in_memory(SMALL, torch.arange(6) % 2, world_size)
    dgl.seed(1)
    torch.manual_seed(1)
    theirs, whole = dgl.dataloading.SAINTSampler(mode, budget), parts.reference()
    expected = [theirs.sample(whole, None).ndata[dgl.NID] for _ in range(2 * count)]
    found = [
        nodes for sets, _, _ in pool.run(draw_small, mode, budget, count, per_rank=parts.partitions) for nodes in sets
    ]
    assert_same_distribution(*(np.array([int((2**nodes).sum()) for nodes in sets]) for sets in (found, expected)))


def count_walks(partition, budget, coverage):
    """The weights of all nodes and edges, and the subgraphs that they were counted in."""
    torch.set_default_dtype(torch.float64)
    graph = sar.construct_full_graph(partition)
    sampler, drawn = sar.SAINTSampler("walk", budget, coverage=coverage), []
    original = saint.keep_sources

    def spy(local, relation, offsets, picked, nodes):
        drawn.append(nodes)
        return original(local, relation, offsets, picked, nodes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saint, "keep_sources", spy)
        source = sampler.prepare(graph)
    (relation,) = source.graph.relations
    weights = relation.features["aggregator_weight"][relation.rows]
    return drawn, source.graph.outputs["_N"]["loss_weight"], relation.ids, weights


@pytest.mark.processes("spies on a module of a process")
@pytest.mark.parametrize("world_size", [1, 2, corner(3)])
def test_counted_weights_are_those_of_the_counted_subgraphs(pool, world_size):
    graph, coverage = random_graph(5, 30, 90, isolated=3), 3
    parts = partition_in_memory(graph, torch.arange(30) * 5 % 7 % world_size, world_size)
    results = pool.run(count_walks, (3, 2), coverage, per_rank=parts.partitions)
    sets = results[0][0]  # each worker hears of all subgraphs
    assert all(len(drawn) == len(sets) for drawn, *_ in results)
    of_nodes = torch.stack([torch.bincount(nodes, minlength=30) for nodes in sets]).sum(0)
    assert of_nodes.sum() > coverage * 30 / 2
    edges, inside = all_edges(parts), [set(nodes.tolist()) for nodes in sets]
    for (_, loss, ids, weights), (start, end) in zip(results, parts.partitions[0].node_ranges, strict=True):
        assert torch.allclose(loss, len(sets) / of_nodes[start:end].clamp(min=1).double(), rtol=1e-12)
        for edge, weight in zip(ids.tolist(), weights.tolist(), strict=True):
            times = sum(set(edges[edge]) <= nodes for nodes in inside)
            assert weight == pytest.approx(max(int(of_nodes[edges[edge][1]]), 1) / max(times, 1), rel=1e-12)


@pytest.mark.parametrize("mode", [corner("node"), "edge"])
@pytest.mark.parametrize("world_size", [2])
def test_weighted_sums_are_unbiased(pool, world_size, mode):
    """The sum of losses, and at each drawn node the sum over its in-edges, against those of the whole graph."""
    graph, count = random_graph(7, 12, 40, no_in_edges=2), 300
    parts = partition_in_memory(graph, torch.arange(12) % 2, world_size)
    results = pool.run(draw_small, mode, 5 if mode == "node" else 4, count, per_rank=parts.partitions)
    values = torch.arange(12).double() ** 2 + 1
    reachable = (
        torch.ones(12).bool()
        if mode != "edge"
        else (parts.reference().in_degrees() + parts.reference().out_degrees()) > 0
    )
    losses, sums = [], {node: [] for node in range(12)}
    edges = all_edges(parts)
    for sets, loss, aggregator in results:
        for nodes in sets:
            members = set(nodes.tolist())
            losses.append(sum(loss[v] * values[v].item() for v in members))
            total = dict.fromkeys(members, 0.0)
            for edge, (u, v) in edges.items():
                if u in members and v in members:
                    total[v] += aggregator[edge] * values[u].item()
            for v, value in total.items():
                sums[v].append(value)
    exact = torch.zeros(12).double().index_add_(0, parts.dst, values[parts.src])
    unlikely = 4.5  # standard errors
    drawn = reachable.nonzero().squeeze(1).tolist()
    checks = [(losses, values[reachable].sum().item()), *((sums[v], exact[v].item()) for v in drawn)]
    for found, expected in checks:
        error = abs(np.mean(found) - expected)
        assert error <= unlikely * np.std(found) / len(found) ** 0.5 + 1e-9 * expected, (mode, np.mean(found), expected)


def refused(partition, how):
    graph = sar.construct_full_graph(partition)
    count = graph.num_nodes(graph.ntypes[0])
    if how == "clusters":
        return sar.ClusterGCNSampler(graph, 3)
    if how == "too long":
        return sar.ClusterGCNSampler(graph, 3, torch.zeros(count + (sar.rank() == 0), dtype=torch.int64))
    if how == "too large":
        return sar.ClusterGCNSampler(graph, 3, torch.full((count,), 2 + (sar.rank() == 0)))
    if how == "no such cluster":
        sampler = sar.ClusterGCNSampler(graph, 3)
        return sar.DataLoader(graph, torch.tensor([6]) if sar.rank() == 0 else sampler.cluster_ids, sampler)
    if how == "shared cluster":
        return sar.DataLoader(graph, torch.tensor([2]), sar.ClusterGCNSampler(graph, 3))
    if how == "saint":
        return sar.SAINTSampler("walk", (2, 2)).sample(graph, torch.arange(1))
    if how == "another graph":
        return sar.ClusterGCNSampler(graph, 3).sample(sar.construct_full_graph(partition), torch.tensor([0]))
    assert how == "other budgets"
    return sar.SAINTSampler("node", 3 + sar.rank()).sample(graph, torch.arange(1))


REFUSED = {
    **dict.fromkeys(["clusters", "saint"], ("GraphError", True)),
    **dict.fromkeys(["no such cluster", "shared cluster"], ("GraphError", False)),
    **dict.fromkeys(["too long", "too large", "another graph"], ("ConfigError", False)),
    "other budgets": ("DisagreementError", False),
}


@pytest.mark.parametrize("how", REFUSED)
@pytest.mark.parametrize("world_size", [2])
def test_refused_on_every_worker(pool, world_size, how):
    kind, typed = REFUSED[how]
    partitions = (typed_parts if typed else SCENARIOS["random"])(world_size).partitions
    outcomes = pool.outcomes(refused, how, per_rank=partitions)
    assert outcomes[0].kind == kind, outcomes[0]
    assert outcomes[1].kind in (kind, "PeerError"), outcomes[1]
    if typed:
        assert "Sampler is for graphs of one node and one edge type" in outcomes[0].message


@pytest.mark.parametrize(
    "mode, budget",
    [("nodes", 3), ("node", 0), ("node", (3, 2)), ("edge", 2.5), ("walk", 3), ("walk", (3, 0)), ("walk", "12")],
)
def test_bad_budgets_are_refused_at_once(mode, budget):
    with pytest.raises(ConfigError, match=r"mode|budget"):
        sar.SAINTSampler(mode, budget)


def test_seed_edges_need_a_sampler_of_blocks():
    with pytest.raises(ConfigError, match="SAINTSampler has no seed nodes"):
        sar.EdgePredictionSampler(sar.SAINTSampler("node", 3))
