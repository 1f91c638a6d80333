"""`LadiesSampler`: budgets, probabilities and weights as on one machine, and sums that are right on average."""

import dgl
import numpy as np
import pytest
import torch

import sar
from sar.errors import ConfigError
from sar.sampling.layerwise import draw_systematically
from tests.graphs import partition_in_memory, random_graph
from tests.matrix import BACKGROUND, corner
from tests.parity.blocks import some_seeds
from tests.parity.scenarios import SCENARIOS
from tests.sampling.cases import add_edge_feature, all_edges, describe, edge_features_of, features_of, node_features
from tests.sampling.test_background import same

BUDGETS = [9, 5]


def weights_of(ids):
    """The normalised adjacency in the tests, by edge ID; some entries are 0."""
    return (ids * 7 % 5).double() / 4


def load(mine, weighted, num_workers=0):
    partition, seeds = mine
    torch.set_default_dtype(torch.float64)
    graph = sar.construct_full_graph(partition)
    add_edge_feature(graph)
    graph.edata["w"] = weights_of(graph.edata[dgl.EID])
    features = node_features(partition)
    sampler = sar.LadiesSampler(
        BUDGETS, "w" if weighted else None, input_node_features={"x": features}, output_node_features={"y": features}
    )
    loader = sar.DataLoader(graph, seeds, sampler, 6, seed=2, num_workers=num_workers)
    return [describe(blocks) for blocks in loader]


def inclusion(importance, budget):
    """The probabilities, by bisection of the factor."""
    importance = importance[importance > 0]
    if len(importance) <= budget:
        return torch.ones_like(importance)
    low, high = 0.0, (budget / importance.min()).item()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (middle * importance).clamp(max=1).sum() < budget else (low, middle)
    return (low * importance).clamp(max=1)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("world_size", [corner(1), corner(2), 3])
def test_layers_of_every_graph(pool, world_size, scenario, weighted):
    parts = SCENARIOS[scenario](world_size)
    seeds, edges = some_seeds(parts, "uneven"), all_edges(parts)
    ids = torch.tensor(list(edges), dtype=torch.int64)
    src, dst = torch.tensor(list(edges.values()), dtype=torch.int64).reshape(-1, 2).unbind(1)
    degrees = torch.bincount(dst, minlength=parts.num_nodes)
    entries = weights_of(ids) if weighted else 1 / degrees[dst].double()
    results = pool.run(load, weighted, per_rank=list(zip(parts.partitions, seeds, strict=True)))
    for batches, wanted in zip(results, seeds, strict=True):
        taken = [blocks[-1]["dst"][dgl.NID] for blocks in batches]
        assert torch.equal(torch.cat([wanted[:0], *taken]).sort().values, wanted.sort().values)
        for blocks in batches:
            assert torch.equal(blocks[1]["src"][dgl.NID], blocks[0]["dst"][dgl.NID])
            assert torch.equal(blocks[0]["src"]["x"], features_of(blocks[0]["src"][dgl.NID]))
            assert torch.equal(blocks[1]["dst"]["y"], features_of(blocks[1]["dst"][dgl.NID]))
            for block, budget in zip(blocks, BUDGETS, strict=True):
                sources, outputs = block["src"][dgl.NID], block["dst"][dgl.NID]
                assert torch.equal(sources[: len(outputs)], outputs)
                assert len(sources.unique()) == len(sources)
                into = torch.isin(dst, outputs)
                importance = torch.zeros(parts.num_nodes).double().index_add_(0, src[into], entries[into] ** 2)
                u, v = (nodes[end] for nodes, end in zip((sources, outputs), block["edges"], strict=True))
                drawn = u.unique()
                assert len(drawn) == min(budget, int((importance > 0).sum()))
                assert (importance[drawn] > 0).all()
                assert set(sources[len(outputs) :].tolist()) <= set(drawn.tolist())
                found = block["edata"][dgl.EID]
                assert torch.equal(found.sort().values, ids[into & torch.isin(src, drawn)].sort().values)
                assert torch.equal(block["edata"]["e"], edge_features_of(found))
                assert [edges[e] for e in found.tolist()] == list(zip(u.tolist(), v.tolist(), strict=True))
                probability = torch.zeros(parts.num_nodes).double()
                probability[importance > 0] = inclusion(importance, budget)
                rows = {edge: row for row, edge in enumerate(ids.tolist())}
                exact = entries[[rows[e] for e in found.tolist()]] / probability[u]
                assert torch.allclose(block["edata"]["edge_weights"], exact, rtol=1e-9, atol=0)


@BACKGROUND
@pytest.mark.parametrize("world_size", [corner(1), 2, corner(3)])
def test_same_layers_with_processes(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    mine = list(zip(parts.partitions, some_seeds(parts, "uneven"), strict=True))
    without, again = (pool.run(load, True, per_rank=mine) for _ in range(2))
    assert same(again, without)
    assert same(pool.run(load, True, 1, per_rank=mine, timeout=200), without)


@pytest.mark.parametrize("count", [1, 4, 7, 9, 12])
def test_draws_have_their_probabilities(count):
    importance = torch.tensor([1, 2, 3, 50, 1, 0.7, 90, 4, 2, 1], dtype=torch.float64)
    trials = 2000
    drawn, expected = torch.zeros(len(importance)), torch.zeros(len(importance), dtype=torch.float64)
    for key in range(trials):
        positions, probability = draw_systematically(importance, count, key)
        assert len(positions) == min(count, len(importance))
        assert (positions.diff() > 0).all()
        drawn[positions] += 1
        assert ((expected[positions] == 0) | (expected[positions] == probability)).all()
        expected[positions] = probability
    exact = inclusion(importance, count)
    assert torch.allclose(expected, exact, rtol=1e-9, atol=0)
    error = (drawn / trials - exact).abs()
    assert (error <= 4.5 * (exact * (1 - exact) / trials).sqrt() + 1e-12).all(), (drawn / trials, exact)


def mean_of_sums(mine, trials):
    """Of the weighted sums at the seeds: mean and standard error."""
    partition, seeds = mine
    torch.set_default_dtype(torch.float64)
    graph = sar.construct_full_graph(partition)
    ids = torch.arange(*partition.node_ranges[sar.rank()])
    sampler = sar.LadiesSampler([4], input_node_features={"h": ids.double() ** 2})
    torch.manual_seed(sar.rank())
    sums = []
    for _ in range(trials):
        (block,) = sampler.sample(graph, seeds)
        u, v = block.edges(order="eid")
        messages = block.edata["edge_weights"] * block.srcdata["h"][u]
        sums.append(torch.zeros(len(seeds)).index_add_(0, v, messages))
    found = torch.stack(sums)
    return found.mean(0), found.std(0) / trials**0.5


@pytest.mark.parametrize("world_size", [2])
def test_sums_are_unbiased(pool, world_size):
    parts = partition_in_memory(random_graph(7, 14, 60, no_in_edges=2), torch.arange(14) % 2, world_size)
    seeds = [torch.arange(0, 7, 2), torch.arange(7, 14)]
    h = torch.arange(14).double() ** 2
    degrees = torch.bincount(parts.dst, minlength=14)
    exact = torch.zeros(14).double().index_add_(0, parts.dst, h[parts.src] / degrees[parts.dst])
    results = pool.run(mean_of_sums, 300, per_rank=list(zip(parts.partitions, seeds, strict=True)))
    spread = 0.0
    for (mean, error), nodes in zip(results, seeds, strict=True):
        assert ((mean - exact[nodes]).abs() <= 4.5 * error + 1e-9).all(), (mean, exact[nodes], error)
        spread += float((error / exact[nodes].clamp(min=1)).sum())
    assert spread > 0.01  # the sums do vary
    assert np.isfinite(spread)


def link_prediction(partition):
    graph = sar.construct_full_graph(partition)
    inner = sar.LadiesSampler([6, 6])
    sampler = sar.EdgePredictionSampler(inner, "self", negative_sampler=1)
    found = []
    for _, pairs, _, blocks in sar.DataLoader(graph, graph.edata[dgl.EID], sampler, 5, seed=1):
        assert torch.equal(blocks[-1].dstdata[dgl.NID], pairs.ndata[dgl.NID])
        found.append(sum(int(torch.isin(block.edata[dgl.EID], pairs.edata[dgl.EID]).sum()) for block in blocks))
        assert all("edge_weights" in block.edata for block in blocks)
    return found


@pytest.mark.parametrize("world_size", [2])
def test_seed_edges(pool, world_size):
    for found in pool.run(link_prediction, per_rank=SCENARIOS["random"](world_size).partitions):
        assert len(found) > 3
        assert sum(found) == 0


@pytest.mark.parametrize("budgets", [[], 5, [1.5], [0], [True], "12"])
def test_bad_budgets_are_refused_at_once(budgets):
    with pytest.raises(ConfigError, match="nodes_per_layer"):
        sar.LadiesSampler(budgets)
