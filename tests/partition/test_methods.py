"""What all methods promise, the definitions of ldg and of multilevel's steps, and what METIS is given."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.quality import measure_quality
from sar.cli.demo import community_graph
from sar.partition.assign import ldg as ldg_module
from sar.partition.assign import metis as metis_module
from sar.partition.assign import multilevel as multilevel_module
from sar.partition.assign.assigning import method_named
from sar.partition.assign.external_csr import ExternalCsr
from sar.partition.assign.ldg import greedy_parts
from sar.partition.assign.metis import _adjacency_lists
from sar.partition.assign.multilevel import cluster, multilevel, refine
from sar.partition.assign.task import draw
from tests.partition.tasks import edge_task, odd_graphs, source, task_of, typed_task

METHODS = ["random", "spring", "ldg", "multilevel"]


@pytest.fixture(scope="module")
def planted():
    """Eight communities, and in-edges and a mask to balance."""
    data = community_graph(num_nodes=4000, num_edges=64_000, num_features=1, homophily=0.7)
    mask = np.zeros(4000, bool)
    mask[:1000] = True
    return data, {"in_edges": np.bincount(data.ends()[1], minlength=4000), "train_mask": mask}


@pytest.fixture
def few_entries(monkeypatch):
    """METIS is given little, so that small graphs are contracted too."""
    monkeypatch.setattr(multilevel_module, "COARSE_ENTRIES", 3000)


@pytest.mark.parametrize("num_parts", [1, 2, 7, 100])
@pytest.mark.parametrize("name", odd_graphs())
@pytest.mark.parametrize("method", METHODS)
def test_odd_graphs_are_divided(tmp_path, method, name, num_parts):
    graph = odd_graphs()[name]
    part_of = method_named(method)(task_of(graph, num_parts, tmp_path))
    assert part_of.shape == (graph.total_nodes,)
    assert part_of.dtype.kind in "iu"
    sizes = np.bincount(part_of, minlength=num_parts)
    assert len(sizes) == num_parts
    assert sizes.max() <= max(np.ceil(graph.total_nodes / num_parts), 1.05 * graph.total_nodes / num_parts)


@pytest.mark.parametrize("num_parts", [4, 64])
@pytest.mark.parametrize("method", METHODS)
def test_equal_tasks_give_equal_parts_within_the_limits(tmp_path, planted, method, num_parts, few_entries):
    graph, weights = planted
    first, again, other = (
        method_named(method)(task_of(graph, num_parts, tmp_path, weights, seed=seed, imbalance=0.1))
        for seed in (3, 3, 4)
    )
    assert (first == again).all()
    assert (first != other).any()
    balance = measure_quality(graph, first, num_parts, weights).balance
    assert set(balance) == {"nodes", "in_edges", "train_mask"}
    assert max(balance.values()) <= 1.1 + 1e-6, balance


def test_random_parts_are_even_in_all_respects(tmp_path, planted):
    graph, weights = planted
    parts = method_named("random")(task_of(graph, 7, tmp_path, weights))
    for count in (np.bincount(parts), np.bincount(parts[weights["train_mask"]])):
        assert np.ptp(count) <= 1
    load = np.bincount(parts, weights=weights["in_edges"])
    assert load.max() < 1.02 * load.mean()


@pytest.mark.parametrize("method", METHODS[:2])
def test_types_are_counted_through_and_progress_is_told(method):
    cites, writes = ("paper", "cites", "paper"), ("author", "writes", "paper")
    edges = {cites: [(i, (i + 1) % 20) for i in range(20)], writes: [(i % 6, i) for i in range(20)]}
    task = typed_task({"author": 6, "paper": 20}, edges, 2)
    flat = edge_task(26, [(u + 6, v + 6) for u, v in edges[cites]] + [(u, v + 6) for u, v in edges[writes]], 2)
    calls = []
    parts = method_named(method)(replace(task, progress=lambda doing, share: calls.append((doing, share))))
    assert np.array_equal(parts, method_named(method)(flat))
    assert calls[-1][1] == 1.0
    assert all(0 <= share <= 1 and doing for doing, share in calls)


# ---- ldg


def literal_ldg(neighbours, weights, num_parts, seed):
    """The definition, with lists and dictionaries."""
    part_of = {}
    for _ in range(ldg_module.PASSES):
        loads, before = np.zeros((num_parts, weights.shape[1])), dict(part_of)
        for v, near in enumerate(neighbours):
            counts = np.zeros(num_parts)
            for u in near:
                if u in part_of:
                    counts[part_of[u]] += 1
            fits = ((loads + weights[v] <= 1 + 1e-6) | (weights[v] == 0)).all(axis=1)
            fill = np.where(fits, np.minimum(loads.max(axis=1), 1), loads.max(axis=1))
            ties = [int(draw(np.uint64(seed), v, part)) for part in range(num_parts)]
            known = [part for part in range(num_parts) if fits[part] and counts[part] > 0]
            if known:
                part_of[v] = max(known, key=lambda p: (counts[p] * (1 - fill[p]), -fill[p], ties[p]))
            else:
                part_of[v] = max(range(num_parts), key=lambda p: (fits[p], -fill[p], ties[p]))
            loads[part_of[v]] += weights[v]
        if sum(part_of[v] != before.get(v, -1) for v in part_of) <= ldg_module.CONVERGED * len(neighbours):
            break
    return [part_of[v] for v in range(len(neighbours))]


@pytest.mark.parametrize("num_parts", [2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_ldg_is_its_definition(tmp_path, num_parts, seed):
    data = community_graph(num_nodes=300, num_edges=2400, num_features=1, num_classes=6, seed=seed)
    src, dst = (
        np.append(ids, more) for ids, more in zip(data.ends(), ([3, 4], [3, 5]), strict=True)
    )  # a loop, and an edge once more
    in_edges = np.bincount(dst, minlength=300)
    task = task_of(source(src, dst, 300), num_parts, tmp_path, {"in_edges": in_edges}, seed=seed)
    neighbours = [[] for _ in range(300)]
    for u, v in zip(src.tolist(), dst.tolist(), strict=True):
        if u != v:
            neighbours[u].append(v)
            neighbours[v].append(u)
    weights = task.relative_weights()
    part_of = greedy_parts(ExternalCsr.of_graph(task.graph, tmp_path / "lists"), weights, task)
    assert part_of.tolist() == literal_ldg(neighbours, weights, num_parts, seed)


def test_windows_and_buckets_make_no_difference(tmp_path, planted, monkeypatch):
    expected = [method_named(name)(task_of(planted[0], 4, tmp_path)) for name in ("ldg", "multilevel")]
    monkeypatch.setattr("sar.partition.assign.external_csr.PIECE", 1000)
    monkeypatch.setattr(ExternalCsr.windows, "__defaults__", (700,))
    found = [method_named(name)(task_of(planted[0], 4, tmp_path)) for name in ("ldg", "multilevel")]
    assert [one.tolist() for one in found] == [one.tolist() for one in expected]


# ---- label propagation


@pytest.mark.parametrize("weighed", [False, True])
def test_parts_do_not_depend_on_the_number_of_threads(tmp_path, planted, few_entries, monkeypatch, weighed):
    monkeypatch.setattr(multilevel_module, "WINDOW", 8000)  # several slices in each window
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            task = task_of(planted[0], 4, tmp_path, planted[1] if weighed else {})
            found.append(multilevel(task).tolist())
    finally:
        torch.set_num_threads(before)
    assert all(one == found[0] for one in found)


def test_stars_and_isolated_nodes_are_clustered(tmp_path):
    leaves = np.arange(1, 1000)
    csr = ExternalCsr.of_graph(source(leaves, 0 * leaves, 2000), tmp_path / "lists")
    label, count = cluster(csr, np.ones((2000, 1), np.float32), 100, 5, 0, lambda share: None)
    assert count <= 22
    assert np.bincount(label).max() <= 100
    assert not set(label[:1000]) & set(label[1000:]), "leaves and isolated nodes are not alike"


def test_refinement_lowers_the_cut_and_empties_parts_that_are_too_full(tmp_path, planted):
    graph, weights = planted
    task = task_of(graph, 4, tmp_path, weights)
    csr, relative = ExternalCsr.of_graph(graph, tmp_path / "lists"), task.relative_weights()
    start = np.random.default_rng(0).choice(4, 4000, p=[0.4, 0.2, 0.2, 0.2]).astype(np.int32)
    refined = start.copy()
    refine(csr, relative, refined, 4, 8, 0, lambda share: None)
    before, after = (measure_quality(graph, one, 4, weights) for one in (start, refined))
    assert after.edge_cut < before.edge_cut - 0.1
    assert before.balance["nodes"] > 1.5
    assert max(after.balance.values()) <= 1.05 + 1e-6


# ---- METIS


def test_entries_are_drawn_alike_in_both_directions_and_right_on_average(tmp_path, planted):
    fine = ExternalCsr.of_graph(planted[0], tmp_path / "fine")
    label, count = cluster(fine, np.full((4000, 1), 1e-3, np.float32), 0.02, 3, 0, lambda share: None)
    csr = fine.contracted(label, count, tmp_path / "coarse")
    total = sum(window.weights.sum() for window in csr.windows())
    indptr, neighbours, weights = _adjacency_lists(csr, 3.0, 0)
    own = np.repeat(np.arange(count), np.diff(indptr))
    matrix = np.zeros((count, count))
    np.add.at(matrix, (own, neighbours), weights)
    assert (matrix == matrix.T).all()
    assert matrix.sum() == pytest.approx(total / 3, rel=0.02)
    assert len(neighbours) < csr.num_entries
    assert len(_adjacency_lists(csr, 1.0, 0).neighbours) == csr.num_entries


@pytest.mark.parametrize("weighed", [False, True])
def test_contracting_cuts_no_more_than_a_tenth_above_metis_on_all_nodes(tmp_path, planted, monkeypatch, weighed):
    graph, weights = planted[0], planted[1] if weighed else {}
    cuts = []
    for entries in (multilevel_module.COARSE_ENTRIES, 3000):
        monkeypatch.setattr(multilevel_module, "COARSE_ENTRIES", entries)
        part_of = multilevel(task_of(graph, 4, tmp_path, weights))
        cuts.append(measure_quality(graph, part_of, 4).edge_cut)
    assert cuts[1] <= 1.1 * cuts[0], cuts


def test_multilevel_contracts_as_often_as_memory_asks_for(tmp_path, planted):
    levels = []
    for memory in (None, 2**20, 2**18):
        said = []
        task = task_of(
            planted[0], 4, tmp_path, memory=memory, progress=lambda doing, share, said=said: said.append(doing)
        )
        multilevel(task)
        levels.append(len({doing for doing in said if doing.startswith("clustering")}))
    assert levels[0] == 0
    assert 0 < levels[1] <= levels[2]


@pytest.mark.parametrize("weighed", [False, True])
def test_metis_gets_neither_isolated_nodes_nor_small_components(tmp_path, monkeypatch, weighed):
    """On three edges among 1.5 million nodes it takes minutes."""
    given = []
    metis_parts = metis_module.metis_parts

    def recorded(lists, *others, **options):
        given.append(len(lists.indptr) - 1)
        return metis_parts(lists, *others, **options)

    monkeypatch.setattr(metis_module, "metis_parts", recorded)
    rng = np.random.default_rng(0)
    connected, pairs = rng.permutation(4000)[:1300].reshape(2, -1), np.arange(4000, 5000).reshape(2, -1)
    ring = np.stack([connected.reshape(-1), np.roll(connected.reshape(-1), 1)])
    graph = source(*np.concatenate([ring, connected, pairs], axis=1), 5000)
    weights = {"train_mask": rng.random(5000) < 0.5} if weighed else {}
    part_of = multilevel(task_of(graph, 4, tmp_path, weights))
    assert given == [1300]
    assert (part_of[pairs[0]] == part_of[pairs[1]]).all()
    balance = measure_quality(graph, part_of, 4, weights).balance
    assert max(balance[name] for name in ("nodes", *weights)) <= 1.05 + 1e-6, balance
    assert np.bincount(part_of[connected.reshape(-1)]).max() <= 1.1 * 1300 / 4


def test_metis_gets_no_parallel_edges(tmp_path):
    """With more edges at a node than there are nodes it writes beyond its buffers."""
    csr = ExternalCsr.of_graph(odd_graphs()["parallel edges"], tmp_path / "lists")
    indptr, neighbours, weights = _adjacency_lists(csr, 1.0, 0)
    assert indptr.tolist() == [0, 1, 2, 3, 4, 4, 4, 4, 4]
    assert neighbours.tolist() == [1, 0, 3, 2]
    assert weights.tolist() == [30] * 4


def test_metis_cuts_a_grid_with_both_directions_stored_along_a_line(tmp_path):
    rows, columns = np.divmod(np.arange(60 * 60), 60)
    right, down = np.flatnonzero(columns < 59), np.flatnonzero(rows < 59)
    low, high = np.concatenate([right, down]), np.concatenate([right + 1, down + 60])
    graph = source(np.concatenate([low, high]), np.concatenate([high, low]), 3600)
    part_of = multilevel(task_of(graph, 4, tmp_path))
    assert measure_quality(graph, part_of, 4).edge_cut < 0.04  # two straight lines cut 0.017
