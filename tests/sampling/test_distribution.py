"""What is drawn is distributed as DGL's own draws on one machine, and independent between workers."""

import dgl
import numpy as np
import pytest
import torch
from scipy import stats

import sar
from tests.graphs import EdgeList, partition_in_memory

SOURCES, MIDDLE = 6, 20_000
WEIGHTS = torch.tensor([0.0, 1.0, 2.0, 3.0, 1.0, 8.0])
FANOUT = 3


def copies_of_a_star(world_size):
    """`MIDDLE` nodes that each read the first `SOURCES` nodes, and for every worker a root that reads them."""
    middle = SOURCES + torch.arange(MIDDLE)
    roots = SOURCES + MIDDLE + torch.arange(world_size)
    src = torch.cat([torch.arange(SOURCES).repeat(MIDDLE), middle.repeat(world_size)])
    dst = torch.cat([middle.repeat_interleave(SOURCES), roots.repeat_interleave(MIDDLE)])
    weights = torch.cat([WEIGHTS.repeat(MIDDLE), torch.ones(MIDDLE * world_size)])
    nodes = SOURCES + MIDDLE + world_size
    assignment = torch.arange(nodes) % world_size
    parts = partition_in_memory(EdgeList(src, dst, nodes), assignment, world_size, {"w": weights})
    return parts, dgl.graph((src[: -MIDDLE * world_size], dst[: -MIDDLE * world_size])), weights


def outcomes(middle, sources):
    """For every middle node, in order, how often each source was drawn, as a number in base 10; (MIDDLE,)."""
    table = np.zeros((SOURCES + MIDDLE, SOURCES), dtype=np.int64)
    np.add.at(table, (middle.numpy(), sources.numpy()), 1)
    return (table[SOURCES:] * 10 ** np.arange(SOURCES)).sum(1)


def draw(partition, prob, replace, original):
    """The middle nodes' draws, asked for by this worker's root."""
    graph = sar.construct_full_graph(partition)
    torch.manual_seed(sar.rank())
    sampler = sar.DistNeighborSampler([FANOUT, -1], prob=prob, replace=replace)
    root = torch.tensor([partition.node_ranges[sar.rank()][1] - 1])
    block = sampler.sample(graph, root)[0]
    src, dst = (original[block.srcdata[dgl.NID][end]] for end in block.edges(order="eid"))
    keep = (dst >= SOURCES) & (dst < SOURCES + MIDDLE)  # the root draws too
    return outcomes(dst[keep], src[keep])


def common(values):
    """The values, with those that are too rare for the test in one."""
    distinct, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.where(counts < (5 * len(values)) ** 0.5, -1, distinct)[which]


def assert_independent(a, b):
    """A chi-square test of pairs (a, b)."""
    table = stats.contingency.crosstab(common(a), common(b)).count
    assert min(table.shape) > 1
    assert stats.chi2_contingency(table).pvalue > 1e-5, table


def assert_same_distribution(a, b):
    assert_independent(np.concatenate([a, b]), np.repeat([0, 1], [len(a), len(b)]))


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("prob", [None, "w"])
@pytest.mark.parametrize("world_size", [2])
def test_draws_are_distributed_as_dgl_s(pool, world_size, prob, replace):
    parts, whole, weights = copies_of_a_star(world_size)
    whole.edata["w"] = weights[: whole.num_edges()]
    dgl.seed(1)
    sampled = dgl.sampling.sample_neighbors(
        whole, torch.arange(SOURCES, SOURCES + MIDDLE), FANOUT, prob=prob, replace=replace
    )
    src, dst = sampled.edges()
    expected = outcomes(dst, src)
    results = pool.run(draw, prob, replace, parts.node_ids, per_rank=parts.partitions)
    for result in results:
        assert len(result) == MIDDLE
        assert prob is None or (result % 10 == 0).all()  # of weight 0
        assert_same_distribution(result, expected)
    assert_independent(*(result // 10 ** (SOURCES - 1) for result in results))
