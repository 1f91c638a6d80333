"""SPRING against algorithm 1 of its paper, written down line by line."""

from bisect import bisect_left
from collections import Counter, defaultdict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sar.data.arrays import Array
from sar.errors import ConfigError
from sar.partition.assign.assigning import AssigningOptions, assign, method_named
from sar.partition.assign.rebalance import move_nodes
from tests.partition.tasks import Edges, edge_task, small_graphs, source


def algorithm_1(
    num_nodes: int, edges: Edges, p: int, beta: Fraction, seed: int, bound: Fraction = Fraction(1, 2)
) -> Array:
    """Algorithm 1; what differs from the pseudo code is told in the docstring of `spring`."""
    edges = [(u, v) for u, v in edges if u != v]
    nodes = range(num_nodes)
    d = Counter(end for edge in edges for end in edge)
    tau = d.total() * bound // p
    k, c, vol, n = 1, dict.fromkeys(nodes, 0), defaultdict(int), {}
    members: dict[int, set[int]] = defaultdict(set)
    for u, v in edges:
        for end in (u, v):
            if c[end] == 0:
                c[end] = k
                k += 1
                vol[c[end]] += d[end]
                members[c[end]] = {end}
        if c[u] != c[v] and vol[c[u]] <= tau and vol[c[v]] <= tau:
            moved, target = (u, c[v]) if vol[c[u]] <= vol[c[v]] else (v, c[u])
            members[c[moved]].remove(moved)
            members[target].add(moved)
            vol[c[moved]] -= d[moved]
            vol[target] += d[moved]
            c[moved] = target
        for one, other in ((u, v), (v, u)):
            if one not in n or d[n[one]] < d[other]:
                n[one] = other
    for v in nodes:
        if c[v] == 0:
            c[v] = k
            members[k] = {v}
            k += 1

    rng = np.random.default_rng(seed)
    lot = rng.permutation(num_nodes)
    shuffled = [1 + int(i) for i in rng.permutation(k - 1)]

    def representative(cluster: int) -> int | None:
        candidates = [v for v in members[cluster] if v in n]
        return max(candidates, key=lambda v: (d[n[v]], -lot[v]), default=None)

    queue = sorted((i for i in reversed(shuffled) if members[i]), key=lambda i: len(members[i]))
    while queue:
        i = queue.pop(0)
        r = representative(i)
        if r is None:
            continue
        t = c[n[r]]
        if i != t and len(members[i]) + len(members[t]) <= beta * num_nodes / p:
            if t in queue:
                queue.remove(t)
            members[t] |= members[i]
            c.update(dict.fromkeys(members[i], t))
            members[i] = set()
            queue.insert(bisect_left([len(members[other]) for other in queue], len(members[t])), t)

    parts: list[set[int]] = [set() for _ in range(p)]
    for i in sorted((i for i in shuffled if members[i]), key=lambda i: -len(members[i])):
        min(parts, key=len).update(members[i])
    return rebalanced([next(s for s in range(p) if v in parts[s]) for v in nodes], edges, p, beta, seed)


def rebalanced(parts: list[int], edges: Edges, p: int, beta: Fraction, seed: int) -> Array:
    """What the paper leaves too large, rebalanced by the edges that nodes have within their parts."""
    within = Counter(end for u, v in edges for end in (u, v) if parts[u] == parts[v])
    attachment = np.array([within[v] for v in range(len(parts))])
    task = edge_task(len(parts), [], p, imbalance=float(beta - 1), seed=seed)
    return move_nodes(task, np.array(parts, np.int32), attachment)


@settings(max_examples=150)
@given(
    small_graphs(),
    st.integers(1, 5),
    st.sampled_from(["0", "0.05", "0.3", "1"]),
    st.integers(0, 3),
    st.sampled_from([0.125, 0.5, 0.75, 2.0]),
)
def test_spring_is_algorithm_1(
    graph: tuple[int, Edges], num_parts: int, imbalance: str, seed: int, bound: float
) -> None:
    expected = algorithm_1(*graph, num_parts, 1 + Fraction(imbalance), seed, Fraction(bound))
    options = {"imbalance": float(imbalance), "seed": seed, "volume_bound": bound}
    found = method_named("spring")(edge_task(*graph, num_parts, **options))
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("num_parts", [6, 20])
@pytest.mark.parametrize("skew", [0.02, 0.1])
def test_spring_is_algorithm_1_on_a_larger_graph(num_parts: int, skew: float) -> None:
    """The first nodes are hubs, some with a volume above tau; the last ones have no edges."""
    ends = np.minimum(np.random.default_rng(0).geometric([skew, 0.01], size=(900, 2)) - 1, 299)
    edges = [(int(u), int(v)) for u, v in ends]
    expected = algorithm_1(300, edges, num_parts, Fraction("1.05"), seed=1)
    found = method_named("spring")(edge_task(300, edges, num_parts, seed=1))
    assert np.array_equal(found, expected)


def test_a_volume_bound_of_its_own_is_passed_on(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, 60, (2, 240))
    edges = [(int(u), int(v)) for u, v in zip(src, dst, strict=True)]
    graph = source(src, dst, 60)

    def assigned(bound: float | None, method: str = "spring") -> Array:
        options = AssigningOptions(3, method, seed=2, volume_bound=bound)
        return assign(options, graph, tmp_path / "method", None, lambda doing, share: None).part_of

    expected = [algorithm_1(60, edges, 3, Fraction("1.05"), 2, Fraction(bound)) for bound in (0.0625, 0.5)]
    assert not np.array_equal(*expected)
    assert np.array_equal(assigned(0.0625), expected[0])
    assert np.array_equal(assigned(None), expected[1])
    with pytest.raises(ConfigError, match="for the method 'spring'; the method is 'random'"):
        assigned(0.5, "random")
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="expected a number above 0"):
            assigned(wrong)


def test_merging_follows_the_richest_neighbour() -> None:
    """Two stars, each with a chain that hangs on a leaf: clusters of the chains join the star they hang on."""
    star = [(0, leaf) for leaf in range(1, 10)] + [(9, 20), (20, 21)]
    edges = star + [(u + 10 if u < 20 else u + 2, v + 10 if v < 20 else v + 2) for u, v in star]
    parts = method_named("spring")(edge_task(24, edges, 2))
    assert {*parts[0:10], *parts[20:22]} == {parts[0]}
    assert {*parts[10:20], *parts[22:24]} == {1 - parts[0]}
