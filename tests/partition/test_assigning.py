"""What `sar partition` balances: fields of nodes and in-edges, by any method."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sar.errors import ConfigError
from sar.partition.assign.assigning import IN_EDGES, AssigningOptions, assign, balance_weights
from sar.partition.graph_source import ArrayEdges, GraphSource
from tests.partition.tasks import source


@pytest.mark.parametrize("balance", ["mask", "count", IN_EDGES])
def test_whole_numbers_may_be_rounded_up(tmp_path: Path, caplog: pytest.LogCaptureFixture, balance: str) -> None:
    """Five of a kind in two parts are three and two, which is not worth a warning."""
    five = np.arange(10) < 5
    fields = {"mask": five, "count": five.astype(np.int8)}
    edges = ArrayEdges(np.arange(5) + 5, np.arange(5))
    graph = GraphSource({"_N": 10}, {("_N", "_E", "_N"): edges}, {"_N": fields}, {})
    options = AssigningOptions(parts=2, method="random", balance=(balance,))
    with caplog.at_level(logging.WARNING, logger="sar"):
        part_of, *_ = assign(options, graph, tmp_path / "scratch", None, lambda doing, share: None)
    assert sorted(np.bincount(part_of[five]).tolist()) == [2, 3]
    assert caplog.records == []


@pytest.mark.parametrize("method", ["random", "ldg", "spring", "multilevel"])
def test_every_type_of_nodes_and_edges_is_balanced(tmp_path: Path, method: str) -> None:
    """Two types with dense edges inside and few between, which the smallest cut would tear apart by type."""
    rng = np.random.default_rng(0)
    counts = {"author": 400, "paper": 400, "editor": 1}
    knows, cites = (ArrayEdges(*rng.integers(0, 400, (2, 4000))) for _ in range(2))
    writes = ArrayEdges(*rng.integers(0, 400, (2, 40)))
    edges = {
        ("author", "knows", "author"): knows,
        ("paper", "cites", "paper"): cites,
        ("author", "writes", "paper"): writes,
    }
    graph = GraphSource(counts, edges, {}, {})
    options = AssigningOptions(parts=2, method=method, balance=(IN_EDGES,), imbalance=0.1)
    part_of, *_ = assign(options, graph, tmp_path / "scratch", None, lambda doing, share: None)
    assert np.bincount(part_of[:400], minlength=2).max() <= 220
    assert np.bincount(part_of[400:800], minlength=2).max() <= 220
    for (_, _, destination), of_type in edges.items():
        into = np.bincount(part_of[of_type.read(0, of_type.num_edges)[1] + graph.first_node[destination]], minlength=2)
        assert into.max() <= 1.1 * into.mean() + 1


def community_edges() -> GraphSource:
    """Two communities of 200 nodes; edges into the first train, and of the others one in ten."""
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, 200, (2, 4000))
    second = rng.random(4000) < 0.5
    edges = ArrayEdges(src + 200 * second, dst + 200 * second)
    train = ~second | (rng.random(4000) < 0.1)
    fields = {"train_mask": train, "w": rng.random(4000)}
    return GraphSource({"_N": 400}, {("_N", "_E", "_N"): edges}, {}, {("_N", "_E", "_N"): fields})


@pytest.mark.parametrize("method", ["ldg", "spring", "multilevel"])
@pytest.mark.parametrize("field", ["train_mask", "w"])
def test_a_field_of_the_edges_is_balanced(tmp_path: Path, field: str, method: str) -> None:
    """Training edges, which the smallest cut would leave to one part, and weights of edges."""
    graph = community_edges()
    [etype] = graph.edges
    _, dst = graph.edges[etype].read(0, 4000)

    def loads(balance: tuple[str, ...]) -> np.ndarray:
        options = AssigningOptions(parts=2, method=method, balance=balance, imbalance=0.1)
        part_of, *_ = assign(options, graph, tmp_path / "scratch", None, lambda doing, share: None)
        return np.bincount(part_of[dst], weights=graph.edge_data[etype][field][:], minlength=2)

    balanced = loads((f"{IN_EDGES}/{field}",))
    assert balanced.max() <= 1.1 * balanced.mean() + 1
    if field == "train_mask":
        assert loads(()).max() > 1.1 * balanced.mean() + 1


def test_sums_of_an_edge_field() -> None:
    """Of types that have it, each for itself."""
    knows, likes = ("a", "knows", "a"), ("a", "likes", "b")
    edges = {knows: ArrayEdges(np.array([0, 1, 2]), np.array([1, 1, 0])), likes: ArrayEdges(np.arange(2), np.arange(2))}
    graph = GraphSource({"a": 3, "b": 2}, edges, {}, {knows: {"w": np.array([0.5, 2, 1])}})
    weights = balance_weights(graph, [f"{IN_EDGES}/w"])
    assert weights.pop("in_edges/w of type a:knows:a").tolist() == [1, 2.5, 0, 0, 0]
    assert set(weights) == {"nodes of type a", "nodes of type b"}


@pytest.mark.parametrize(
    "name, words",
    [
        (f"{IN_EDGES}/none", "edge fields train_mask, w"),
        ("none", "in_edges, or one of the node fields feat"),
        ("feat", r"shape \(400, 3\)"),
    ],
)
def test_fields_that_cannot_be_balanced(name: str, words: str) -> None:
    graph = replace(community_edges(), node_data={"_N": {"feat": np.ones((400, 3))}})
    with pytest.raises(ConfigError, match=words):
        balance_weights(graph, [name])


@pytest.mark.parametrize("method", ["random", "ldg", "spring", "multilevel", "metis"])
def test_a_method_that_needs_more_memory_than_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Here 2**31 nodes, as from one large ID."""
    graph = source([0, 1, 2], [1, 2, 2**31 + 5], 2**31 + 6)
    with pytest.raises(ConfigError, match=rf"'{method}' takes [\d,]+ bytes for 2,147,483,654 nodes.*--ids map"):
        assign(AssigningOptions(2, method), graph, tmp_path / "s", 2**30, lambda doing, share: None)
    few = source([0, 1], [1, 2], 2000)
    monkeypatch.setattr("sar.partition.assign.assigning.available_memory", lambda: 20_000)
    with pytest.raises(ConfigError, match="and there are 20,000"):
        assign(AssigningOptions(2, method), few, tmp_path / "s", None, lambda doing, share: None)
