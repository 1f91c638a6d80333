"""Neighbour lists on disk against lists in memory."""

import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sar.partition.assign.external_csr import ExternalCsr, made_ahead
from tests.partition.tasks import odd_graphs, source


def as_counters(csr, entries=1 << 20):
    """The weight of each neighbour of every node."""
    lists = [Counter() for _ in range(csr.num_nodes)]
    for window in csr.windows(entries):
        own = np.repeat(np.arange(window.first, window.last), np.diff(window.bounds))
        weights = window.weights if csr.weighted else np.ones(len(own))
        assert len(own) == len(window.neighbours) == len(weights)
        for v, other, weight in zip(own, window.neighbours, weights, strict=True):
            lists[v][int(other)] += float(weight)
    return lists


def expected(graph, cluster=None, num_clusters=0):
    """As `as_counters`, of a graph or of its clusters; an edge counts once where each is stored with its reverse."""
    ends = np.concatenate([np.stack(chunk, axis=1) for chunk in graph.chunks()] or [np.empty((0, 2), np.int64)])
    ends = ends[ends[:, 0] != ends[:, 1]]
    both_stored = Counter(map(tuple, ends.tolist())) == Counter(map(tuple, ends[:, ::-1].tolist()))
    if cluster is None:
        cluster, num_clusters = np.arange(graph.total_nodes), graph.total_nodes
    lists = [Counter() for _ in range(num_clusters)]
    for src, dst in graph.chunks():
        for u, v in zip(cluster[src].tolist(), cluster[dst].tolist(), strict=True):
            if u != v:
                lists[u][v] += 1 - both_stored / 2
                lists[v][u] += 1 - both_stored / 2
    return lists


@pytest.mark.parametrize("name", odd_graphs())
@pytest.mark.parametrize("bucket", [1, 64, 1 << 20])
def test_lists_are_those_of_the_symmetrised_graph(tmp_path, name, bucket):
    graph = odd_graphs()[name]
    csr = ExternalCsr.of_graph(graph, tmp_path / "lists", bucket)
    assert as_counters(csr) == expected(graph)
    assert csr.num_entries == sum(sum(one.values()) for one in expected(graph))
    assert csr.max_degree == max((sum(one.values()) for one in expected(graph)), default=0)


def test_edges_that_are_stored_with_their_reverse_are_taken_once(tmp_path):
    src, dst = np.random.default_rng(0).integers(20, size=(2, 60))
    both = np.concatenate([src, dst, [3]]), np.concatenate([dst, src, [3]])
    csr = ExternalCsr.of_graph(source(*both, 20), tmp_path / "both")
    assert csr.num_entries == 2 * np.count_nonzero(src != dst)
    assert as_counters(csr) == as_counters(ExternalCsr.of_graph(source(src, dst, 20), tmp_path / "one"))
    one_more = ExternalCsr.of_graph(
        source(*(np.append(ids, end) for ids, end in zip(both, (1, 2), strict=True)), 20), tmp_path / "more"
    )
    assert one_more.num_entries == 2 * csr.num_entries + 2


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_windows_buckets_and_chunks_make_no_difference(tmp_path_factory, data):
    num_nodes = data.draw(st.integers(1, 30))
    node = st.integers(0, num_nodes - 1)
    edges = np.array(data.draw(st.lists(st.tuples(node, node), max_size=80)), np.int64).reshape(-1, 2)
    graph = source(*edges.T, num_nodes)
    folder = tmp_path_factory.mktemp("lists")
    csr = ExternalCsr.of_graph(graph, folder / "fine", data.draw(st.integers(1, 100)))
    assert as_counters(csr, data.draw(st.integers(1, 100))) == expected(graph)
    cluster = np.array(data.draw(st.lists(st.integers(0, 4), min_size=num_nodes, max_size=num_nodes)), np.int32)
    coarse = csr.contracted(cluster, 5, folder / "coarse", data.draw(st.integers(1, 100)))
    assert as_counters(coarse) == expected(graph, cluster, 5)
    assert coarse.num_entries == sum(len(one) for one in expected(graph, cluster, 5)), "parallel edges are not merged"
    again = np.array([0, 1, 0, 1, 1], np.int32)
    twice = coarse.contracted(again, 2, folder / "coarser", data.draw(st.integers(1, 100)))
    assert as_counters(twice) == expected(graph, again[cluster], 2)


def test_windows_hold_whole_lists_in_the_order_of_nodes(tmp_path):
    graph = odd_graphs()["star"]
    csr = ExternalCsr.of_graph(graph, tmp_path / "lists")
    windows = [(window.first, window.last, len(window.neighbours)) for window in csr.windows(50)]
    assert windows[0] == (0, 1, 199), "the centre's list is longer than a window"
    assert [first for first, _, _ in windows] == [0, *(last for _, last, _ in windows[:-1])]
    assert windows[-1][1] == 200
    assert all(count <= 50 for _, _, count in windows[1:])


# ---- a thread that makes the next item while another uses the last one


def test_the_next_item_is_made_while_one_is_in_use():
    second_begun = threading.Event()

    def items():
        yield "first"
        second_begun.set()
        yield "second"

    for item in made_ahead(items()):
        assert second_begun.wait(60), item
