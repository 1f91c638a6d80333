"""What all streaming methods promise: whole numbers in range, balance, the same every time, and cuts below random."""

import dataclasses

import numpy as np
import pytest

from sar.cli.demo import community_graph
from sar.data.arrays import Array
from sar.errors import ConfigError
from sar.partition.assign.assigning import method_named
from sar.partition.assign.task import AssignmentTask
from sar.partition.graph_source import GraphSource
from sar.partition.ingest.masks import with_split
from tests.partition.tasks import Edges, edge_task, typed_task

STREAMING = ["random", "spring"]
BOTH_WAYS = [(0, 1), (1, 0), (1, 2), (2, 1)]


@pytest.fixture(scope="module")
def communities() -> GraphSource:
    return with_split(community_graph(1500, 15_000, 1, 4, homophily=0.95))


def task_on(graph: GraphSource, num_parts: int, **options: object) -> AssignmentTask:
    return edge_task(graph.total_nodes, graph.ends(), num_parts, **options)


@pytest.mark.parametrize("name", STREAMING)
@pytest.mark.parametrize(
    "num_nodes, edges",
    [
        (0, []),
        (1, []),
        (1, [(0, 0), (0, 0)]),
        (3, BOTH_WAYS),
        (5, [(0, 0), (4, 4)]),
        (6, [*BOTH_WAYS, *BOTH_WAYS, *BOTH_WAYS, (5, 5)]),
        (40, [(node, 0) for node in range(40)]),
    ],
    ids=["empty", "one node", "a loop", "a path", "loops only", "repeated edges", "a star"],
)
@pytest.mark.parametrize("num_parts", [1, 2, 4, 100])
def test_any_graph_and_number_of_parts(name: str, num_nodes: int, edges: Edges, num_parts: int) -> None:
    parts = method_named(name)(edge_task(num_nodes, edges, num_parts))
    assert parts.shape == (num_nodes,)
    assert parts.dtype == np.int32
    assert ((parts >= 0) & (parts < num_parts)).all()
    mean = num_nodes / num_parts
    assert np.bincount(parts, minlength=num_parts).max() <= max(1.05 * mean, np.ceil(mean))


@pytest.mark.parametrize("name", STREAMING)
@pytest.mark.parametrize("num_parts", [3, 64, 130])
def test_same_task_same_parts(name: str, num_parts: int, communities: GraphSource) -> None:
    one, again, other_seed = (
        method_named(name)(task_on(communities, num_parts, seed=seed, weights={"in_edges": in_edges(communities)}))
        for seed in (5, 5, 6)
    )
    assert np.array_equal(one, again)
    if num_parts > 3:  # with few parts there may be no ties between clusters to break
        assert not np.array_equal(one, other_seed)


def in_edges(graph: GraphSource) -> Array:
    return np.bincount(graph.ends()[1], minlength=graph.total_nodes)


@pytest.mark.parametrize("name", STREAMING)
@pytest.mark.parametrize("num_parts", [2, 5, 16])
def test_every_weight_is_balanced(name: str, num_parts: int, communities: GraphSource) -> None:
    weights = {"train_mask": communities.node_data["_N"]["train_mask"], "in_edges": in_edges(communities)}
    parts = method_named(name)(task_on(communities, num_parts, weights=weights, imbalance=0.1))
    for weight in [np.ones(communities.total_nodes), *weights.values()]:
        load = np.bincount(parts, weights=weight, minlength=num_parts)
        assert load.max() <= max(1.1 * load.mean(), np.ceil(load.mean()))


def test_random_parts_are_even_in_all_respects(communities: GraphSource) -> None:
    train, num_parts = communities.node_data["_N"]["train_mask"], 7
    weights = {"in_edges": in_edges(communities), "train_mask": train}
    parts = method_named("random")(task_on(communities, num_parts, weights=weights))
    for count in (np.bincount(parts), np.bincount(parts[train])):
        assert np.ptp(count) <= 1
    load = np.bincount(parts, weights=weights["in_edges"])
    assert load.max() < 1.02 * load.mean()


@pytest.mark.parametrize("name", STREAMING)
def test_types_are_counted_through_and_progress_is_told(name: str) -> None:
    cites, writes = ("paper", "cites", "paper"), ("author", "writes", "paper")
    edges = {cites: [(i, (i + 1) % 20) for i in range(20)], writes: [(i % 6, i) for i in range(20)]}
    task = typed_task({"author": 6, "paper": 20}, edges, 2)
    flat = edge_task(26, [(u + 6, v + 6) for u, v in edges[cites]] + [(u, v + 6) for u, v in edges[writes]], 2)
    calls: list[tuple[str, float]] = []
    parts = method_named(name)(dataclasses.replace(task, progress=lambda doing, share: calls.append((doing, share))))
    assert np.array_equal(parts, method_named(name)(flat))
    assert calls[-1][1] == 1.0
    assert all(0 <= share <= 1 and doing for doing, share in calls)


def test_unknown_names_are_told() -> None:
    with pytest.raises(ConfigError, match="no partition method 'springs'; expected one of random, spring, ldg"):
        method_named("springs")
