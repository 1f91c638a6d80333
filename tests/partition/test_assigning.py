"""What `sar partition` balances: fields of nodes and in-edges, by any method."""

import logging
from pathlib import Path

import numpy as np
import pytest

from sar.partition.assign.assigning import IN_EDGES, AssigningOptions, assign
from sar.partition.graph_source import ArrayEdges, GraphSource


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


@pytest.mark.parametrize("method", ["random", "ldg", "spring", "multilevel", "metis"])
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
        into = np.bincount(part_of[of_type.dst + graph.first_node[destination]], minlength=2)
        assert into.max() <= 1.1 * into.mean() + 1
