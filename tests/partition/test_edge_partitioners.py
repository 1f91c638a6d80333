"""The streaming edge partitioners against their papers' rules, edge by edge, in plain Python."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.edge_partitioners import method_named
from sar.data.arrays import Array
from tests.partition.tasks import Edges, edge_task, small_graphs

IMBALANCE = 0.05
PlacedEdge = tuple[int, int, int]


@dataclass
class Placed:
    """Edges placed so far."""

    num_parts: int
    parts_of: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    count: Counter[int] = field(default_factory=Counter)

    def put(self, edge: tuple[int, int], part: int) -> PlacedEdge:
        self.count[part] += 1
        for node in edge:
            self.parts_of[node].add(part)
        return *edge, part

    def lightest(self, parts: set[int]) -> int:
        return min(parts, key=lambda part: (self.count[part], part))


def capacity(edges: Edges, num_parts: int) -> float:
    return np.ceil((1 + IMBALANCE) * len(edges) / num_parts)


def degrees(edges: Edges) -> Counter[int]:
    return Counter(node for edge in edges for node in edge)


def dbh(num_nodes: int, edges: Edges, num_parts: int, seed: int) -> Iterator[PlacedEdge]:
    hashed = np.random.default_rng(seed).integers(num_parts, size=num_nodes, dtype=np.int32)
    degree = degrees(edges)
    for u, v in edges:
        yield u, v, hashed[u if degree[u] < degree[v] else v]


def greedy(num_nodes: int, edges: Edges, num_parts: int, seed: int) -> Iterator[PlacedEdge]:
    placed, to_come = Placed(num_parts), degrees(edges)
    for u, v in edges:
        more, less = (u, v) if to_come[u] >= to_come[v] else (v, u)
        of_more, of_less = placed.parts_of[more], placed.parts_of[less]
        below = {part for part in range(num_parts) if placed.count[part] < capacity(edges, num_parts)}
        choices = of_more & of_less & below or of_more & below or of_less & below or set(range(num_parts))
        yield placed.put((u, v), placed.lightest(choices))
        to_come.subtract((u, v))


def hdrf(num_nodes: int, edges: Edges, num_parts: int, seed: int) -> Iterator[PlacedEdge]:
    placed, seen = Placed(num_parts), Counter()
    for u, v in edges:
        seen.update((u, v))
        sizes = [placed.count[part] for part in range(num_parts)]
        theta = {u: seen[u] / (seen[u] + seen[v]), v: seen[v] / (seen[u] + seen[v])}

        def score(part: int, sizes: list[int] = sizes, theta: dict[int, float] = theta) -> float:
            balance = 1.1 * (max(sizes) - sizes[part]) / (1 + max(sizes) - min(sizes))
            return balance + sum(1 + (1 - theta[node]) for node in theta if part in placed.parts_of[node])

        # Rounded, because equal scores may be added up to different last digits.
        yield placed.put((u, v), max(range(num_parts), key=lambda part: (round(score(part), 9), -part)))


def two_phase(num_nodes: int, edges: Edges, num_parts: int, seed: int) -> Iterator[PlacedEdge]:
    hashed = np.random.default_rng(seed).integers(num_parts, size=num_nodes, dtype=np.int32)
    degree, cluster, volume = degrees(edges), {}, []
    most = np.ceil(2 * len(edges) / num_parts)
    for u, v in edges:
        for node in (u, v):
            if node not in cluster:
                cluster[node] = len(volume)
                volume.append(degree[node])
        if max(volume[cluster[u]], volume[cluster[v]]) <= most:
            goes, stays = (u, v) if volume[cluster[u]] - degree[u] <= volume[cluster[v]] - degree[v] else (v, u)
            if cluster[goes] != cluster[stays] and volume[cluster[stays]] + degree[goes] <= most:
                volume[cluster[goes]] -= degree[goes]
                volume[cluster[stays]] += degree[goes]
                cluster[goes] = cluster[stays]

    placed_volume, part_of_cluster = [0] * num_parts, {}
    for one in sorted(range(len(volume)), key=lambda one: -volume[one]):
        part = min(range(num_parts), key=lambda part: placed_volume[part])
        part_of_cluster[one] = part
        placed_volume[part] += volume[one]

    placed = Placed(num_parts)
    candidates = [(part_of_cluster[cluster[u]], part_of_cluster[cluster[v]]) for u, v in edges]
    within = [i for i, (one, other) in enumerate(candidates) if one == other]
    between = [i for i, (one, other) in enumerate(candidates) if one != other]
    for i in within + between:
        u, v = edges[i]

        def score(part: int, u: int = u, v: int = v) -> float:
            of_u, of_v = volume[cluster[u]], volume[cluster[v]]
            total = 0.0
            for node, its in ((u, of_u), (v, of_v)):
                if part in placed.parts_of[node]:
                    total += 1 + (1 - degree[node] / (degree[u] + degree[v]))
                if part_of_cluster[cluster[node]] == part:
                    total += its / (of_u + of_v)
            return round(total, 9)

        part = max(candidates[i], key=score)
        if placed.count[part] >= capacity(edges, num_parts):
            part = int(hashed[u if degree[u] >= degree[v] else v])
        if placed.count[part] >= capacity(edges, num_parts):
            part = placed.lightest(set(range(num_parts)))
        yield placed.put((u, v), part)


def owners(num_nodes: int, placed: Iterator[PlacedEdge], num_parts: int, seed: int) -> Array:
    """The owners of nodes, as [Note: owners of nodes] in `votes.py` has it."""
    slots: dict[int, Counter[int]] = defaultdict(Counter)
    for node, part in ((node, part) for u, v, part in placed for node in (u, v)):
        mine = slots[node]
        if part in mine or len(mine) < 4:
            mine[part] += 1
        else:
            mine.subtract(list(mine))
            slots[node] = +mine
    best = np.array([max(slots[node].values(), default=0) for node in range(num_nodes)])
    shuffled = np.random.default_rng(seed).permutation(num_nodes)
    order = sorted(shuffled.tolist(), key=lambda node: -best[node])
    [limit] = edge_task(num_nodes, [], num_parts, imbalance=IMBALANCE).constraints().limits
    owner, load = np.full(num_nodes, -1, np.int32), Counter()
    for node in order:
        for part, _ in sorted(slots[node].items(), key=lambda item: (-item[1], item[0])):
            if owner[node] < 0 and load[part] < limit:
                owner[node] = part
                load[part] += 1
    for node in order:
        if owner[node] < 0:
            owner[node] = min(range(num_parts), key=lambda part: (load[part], part))
            load[owner[node]] += 1
    return owner


@pytest.mark.parametrize("name, rule", [("dbh", dbh), ("greedy", greedy), ("hdrf", hdrf), ("2ps-l", two_phase)])
@settings(max_examples=100)
@given(graph=small_graphs(), num_parts=st.sampled_from([1, 2, 3, 5, 70]), seed=st.integers(0, 3))
def test_edges_go_by_the_rule(
    name: str, rule: Callable[..., Iterator[PlacedEdge]], graph: tuple[int, Edges], num_parts: int, seed: int
) -> None:
    num_nodes, edges = graph
    found = method_named(name)(edge_task(num_nodes, edges, num_parts, imbalance=IMBALANCE, seed=seed))
    placed = rule(num_nodes, [(u, v) for u, v in edges if u != v], num_parts, seed)
    assert np.array_equal(found, owners(num_nodes, placed, num_parts, seed))


@pytest.mark.parametrize("name, rule", [("dbh", dbh), ("greedy", greedy), ("hdrf", hdrf), ("2ps-l", two_phase)])
def test_edges_go_by_the_rule_on_a_larger_graph(name: str, rule: Callable[..., Iterator[PlacedEdge]]) -> None:
    ends = np.minimum(np.random.default_rng(0).geometric(0.02, size=(1500, 2)) - 1, 299)
    edges = [(int(u), int(v)) for u, v in ends if u != v]
    found = method_named(name)(edge_task(300, edges, 7, imbalance=IMBALANCE, seed=1))
    assert np.array_equal(found, owners(300, rule(300, edges, 7, 1), 7, 1))
