"""Measures of an assignment against plain NumPy."""

import numpy as np
import pytest

from benchmarks.quality import measure_quality
from sar.errors import ConfigError
from tests.partition.tasks import odd_graphs, source


@pytest.mark.parametrize("num_parts", [1, 3, 8, 9, 20])
def test_measures_are_those_of_numpy(num_parts):
    rng = np.random.default_rng(num_parts)
    src, dst = rng.integers(200, size=(2, 3000))
    part_of, weight = rng.integers(num_parts, size=200), rng.random(200)
    quality = measure_quality(source(src, dst, 200), part_of, num_parts, {"weight": weight})
    edges, halo = np.zeros((2, num_parts, num_parts), int)
    np.add.at(edges, (part_of[src], part_of[dst]), 1)
    read = {(u, part_of[v]) for u, v in zip(src, dst, strict=True) if part_of[u] != part_of[v]}
    for u, q in read:
        halo[part_of[u], q] += 1
    assert (quality.edges == edges).all()
    assert (quality.halo == halo).all()
    assert (quality.nodes == np.bincount(part_of, minlength=num_parts)).all()
    assert (quality.in_edges == np.bincount(part_of[dst], minlength=num_parts)).all()
    assert quality.edge_cut == pytest.approx(np.mean(part_of[src] != part_of[dst]))
    assert quality.replication_factor == pytest.approx((200 + len(read)) / 200)
    sums = [weight[part_of == part].sum() for part in range(num_parts)]
    assert quality.balance["weight"] == pytest.approx(max(sums) / np.mean(sums))
    assert quality.balance["nodes"] == pytest.approx(quality.nodes.max() * num_parts / 200)


@pytest.mark.parametrize("name", odd_graphs())
def test_odd_graphs_have_measures(name):
    graph = odd_graphs()[name]
    quality = measure_quality(graph, np.arange(graph.total_nodes) % 4, 4, {"none": np.zeros(graph.total_nodes)})
    assert quality.edges.sum() == graph.total_edges
    assert quality.nodes.sum() == graph.total_nodes
    assert 0 <= quality.edge_cut <= 1 <= quality.replication_factor
    assert quality.balance["none"] == 1


def test_every_type_of_edge_counts():
    quality = measure_quality(odd_graphs()["two types"], np.repeat([0, 1], [30, 20]), 2)
    assert quality.edges.tolist() == [[0, 90], [0, 40]]


@pytest.mark.parametrize("part_of", [np.zeros(9, int), np.full(10, 2), np.full(10, -1)])
def test_assignments_that_do_not_fit_are_refused(part_of):
    with pytest.raises(ConfigError, match="expected"):
        measure_quality(source([0], [1], 10), part_of, 2)
