"""How many functions of sar a layer's forward and backward call, and in how many files; the stops of `update_all`."""

import sys
from collections import Counter

import dgl.function as fn
import dgl.nn
import pytest

from tests.core.calls import calls_of
from tests.parity.harness import build, random_shares

SIZES = {"GraphConv": (6, 6), "GATConv": (6, 3, 2)}
MOST = {
    ("GraphConv", 1): (50, 24),
    ("GraphConv", 2): (101, 86),
    ("GATConv", 1): (89, 85),
    ("GATConv", 2): (151, 196),
}
"""Calls of a forward and of a backward, by layer and number of workers; a new buffer of an exchange takes some more."""
MOST_FILES = 22
"""Files that a forward of GraphConv passes with 2 workers."""
STOPS = [
    "GraphShardManager.update_all",
    "send_and_reduce",
    "aggregate",
    "Node.forward",
    "Group.agree",
    "Exchange.__post_init__",
    "Group.post",
    "aggregate_sum",
    "accumulate_rows",
    "Reducer.finish",
]
"""In their order; `docs/architecture.md` says what each of them does."""

pytestmark = pytest.mark.processes("workers of one process read each other's rows in another way")


def calls_of_a_layer(mine, name):
    partition, data = mine
    graph, x = build(partition, 1), data.leaf("x")
    layer = getattr(dgl.nn, name)(*SIZES[name], allow_zero_in_degree=True)
    layer(graph, x).sum().backward()  # compiles the operation
    forward, out = calls_of(lambda: layer(graph, x))
    backward, _ = calls_of(out.sum().backward)
    return forward, backward


@pytest.mark.parametrize("name, world_size", sorted(MOST))
def test_a_layer_makes_few_python_calls(pool, name, world_size):
    for of_worker in pool.run(calls_of_a_layer, name, per_rank=random_shares(world_size)):
        for calls, most in zip(of_worker, MOST[name, world_size], strict=True):
            assert len(calls) <= most, Counter(calls).most_common(40)
        if (name, world_size) == ("GraphConv", 2):
            assert len({file for file, _ in of_worker[0]}) <= MOST_FILES


def names_of_an_update(mine):
    graph = build(mine[0], 1)
    graph.ndata["x"] = mine[1].leaf("x")
    calls, _ = calls_of(lambda: graph.update_all(fn.copy_u("x", "m"), fn.sum("m", "out")))
    return [name for _, name in calls]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="qualified names of code")
@pytest.mark.parametrize("world_size", [2])
def test_the_stops_of_update_all(pool, world_size):
    for names in pool.run(names_of_an_update, per_rank=random_shares(world_size)):
        assert not set(STOPS) - set(names)
        assert sorted(STOPS, key=names.index) == STOPS
