"""The generated graph of the demo and the benchmarks."""

import numpy as np
import pytest

from sar.cli.demo import community_graph
from sar.errors import ConfigError
from tests.partition.ingest.sources import assert_same


def test_community_graph_is_a_simple_symmetric_graph_of_the_size_asked_for() -> None:
    graph = community_graph(3000, 40_000, num_features=16, num_classes=5)
    src, dst = graph.ends()
    pairs = src * 3000 + dst
    assert len(src) == len(np.unique(pairs)) == 40_000
    assert np.all(np.diff(pairs) > 0)
    assert np.array_equal(np.sort(dst * 3000 + src), pairs)
    assert not np.any(src == dst)
    assert graph.node_data["_N"]["feat"].shape == (3000, 16)
    assert graph.node_data["_N"]["feat"].dtype == np.float32
    assert np.bincount(graph.node_data["_N"]["label"]).min() > 500


def test_community_graph_has_communities_and_hubs() -> None:
    graph = community_graph(4000, 60_000, num_classes=4, homophily=0.6)
    labels = graph.node_data["_N"]["label"]
    src, dst = graph.ends()
    within = np.mean(labels[src] == labels[dst])
    assert abs(within - (0.6 + 0.4 / 4)) < 0.02
    degrees = np.bincount(dst, minlength=4000)
    assert degrees.max() > 5 * np.median(degrees)
    assert abs(np.corrcoef(labels, np.arange(4000))[0, 1]) < 0.1  # node IDs tell nothing about classes


def test_community_graph_follows_its_seed() -> None:
    assert_same(community_graph(500, 4000, seed=3), community_graph(500, 4000, seed=3))
    one, other = (community_graph(500, 4000, seed=seed).ends()[0] for seed in (3, 4))
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("size", [(100, 51), (100, 9000), (5, 0)])
def test_community_graph_refuses_what_cannot_be_drawn(size: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="cannot draw"):
        community_graph(*size)
