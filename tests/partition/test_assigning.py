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
        part_of, _ = assign(options, graph, tmp_path / "scratch", None, lambda doing, share: None)
    assert sorted(np.bincount(part_of[five]).tolist()) == [2, 3]
    assert caplog.records == []
