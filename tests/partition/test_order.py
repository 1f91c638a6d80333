"""The order of nodes within a part: clusters of the method are consecutive, and everything else is as with IDs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sar
from sar.data.arrays import Array
from sar.errors import ConfigError
from sar.partition.assign import multilevel as multilevel_module
from sar.partition.assign.assigning import Assigned, AssigningOptions, assign
from sar.partition.graph_source import GraphSource
from tests.partition.tasks import odd_graphs, source

COMMUNITIES, SIZE = 80, 50


def shuffled_communities() -> tuple[GraphSource, Array]:
    """Communities of nodes that have 19 of 20 edges among themselves, in random order; and that of each node."""
    rng = np.random.default_rng(0)
    src = rng.integers(COMMUNITIES * SIZE, size=40_000)
    near, far = src // SIZE * SIZE + rng.integers(SIZE, size=40_000), rng.integers(COMMUNITIES * SIZE, size=40_000)
    shuffled = rng.permutation(COMMUNITIES * SIZE)
    dst = np.where(rng.random(40_000) < 0.95, near, far)
    community = np.empty_like(shuffled)
    community[shuffled] = np.arange(len(shuffled)) // SIZE
    return source(shuffled[src], shuffled[dst], len(shuffled)), community


def assigned(graph: GraphSource, parts: int, scratch: Path, **options: Any) -> Assigned:
    return assign(AssigningOptions(parts, **options), graph, scratch / "method", None, lambda doing, share: None)


def share_of_neighbours_alike(values: Array) -> float:
    return float(np.mean(values[1:] == values[:-1]))


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("entries", [1 << 20, 3000])
def test_communities_are_consecutive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int, entries: int) -> None:
    """Whether METIS gets the graph itself, or one of clusters, or nothing as there is one part."""
    monkeypatch.setattr(multilevel_module, "COARSE_ENTRIES", entries)
    graph, community = shuffled_communities()
    found = assigned(graph, parts, tmp_path)
    assert found.place is not None
    order = np.lexsort((found.place, found.part_of))
    assert share_of_neighbours_alike(community[order]) > 0.9
    by_id = np.argsort(found.part_of, kind="stable")
    assert share_of_neighbours_alike(community[by_id]) < 0.2
    again = assigned(graph, parts, tmp_path)
    assert np.array_equal(again.place, found.place), "equal seeds give equal orders"


def test_clusters_of_one_larger_cluster_are_close_by(tmp_path: Path) -> None:
    """A ring, whose first clusters are a few nodes each."""
    shuffled = np.random.default_rng(0).permutation(40_000)
    ring = source(shuffled, np.roll(shuffled, -1), 40_000)
    found = assigned(ring, 1, tmp_path)
    assert found.place is not None
    place = np.empty(40_000, int)
    place[np.argsort(found.place, kind="stable")] = np.arange(40_000)
    assert np.median(np.abs(np.diff(place[shuffled]))) <= 4
    assert np.mean(np.abs(np.diff(place[shuffled])) > 1000) < 0.1


@pytest.mark.parametrize("method", ["multilevel", "spring", "ldg", "random"])
def test_the_order_changes_no_assignment(tmp_path: Path, method: str) -> None:
    graph, _ = shuffled_communities()
    by_ids = assigned(graph, 3, tmp_path, method=method, order="ids")
    assert by_ids.place is None
    by_clusters = assigned(graph, 3, tmp_path, method=method)
    assert np.array_equal(by_ids.part_of, by_clusters.part_of)
    assert (by_clusters.place is not None) == (method in ("multilevel", "spring"))


@pytest.mark.parametrize("method", ["multilevel", "spring"])
@pytest.mark.parametrize("name", odd_graphs())
def test_every_node_of_odd_graphs_has_a_place(tmp_path: Path, name: str, method: str) -> None:
    graph = odd_graphs()[name]
    for parts in (1, 4):
        place = assigned(graph, parts, tmp_path, method=method).place
        assert place is None or (place.shape == (graph.total_nodes,) and place.dtype.kind == "i")


def test_another_order_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="order of nodes is 'size'; expected one of clusters, ids"):
        assigned(shuffled_communities()[0], 2, tmp_path, order="size")


def test_rows_are_found_by_the_ids_of_the_graph(tmp_path: Path) -> None:
    """In either order, by `orig_id` and by `return_mapping`."""
    graph, community = shuffled_communities()
    graph = GraphSource(graph.num_nodes, graph.edges, {"_N": {"community": community}}, {})
    for order in ("clusters", "ids"):
        nodes, _ = sar.partition_graph(graph, "g", 3, tmp_path / order, return_mapping=True, order=order)  # type: ignore[misc]
        parts = [sar.load_dgl_partition_data(tmp_path / order, part, "cpu") for part in range(3)]
        original = torch.cat([part["orig_id"] for part in parts])
        assert original.equal(nodes)
        loaded = torch.cat([part["_N/community"] for part in parts])
        assert loaded.equal(torch.from_numpy(community)[original])
        ascending = all(bool((part["orig_id"].diff() > 0).all()) for part in parts)
        assert ascending == (order == "ids")
