"""What long work says of its stages: lines of the log, and of a command that has no terminal."""

import sys
from pathlib import Path

import numpy as np
import pytest

import sar
from sar.cli import main
from sar.partition import graph_source
from tests.stages import stages_in


@pytest.mark.parametrize("on_a_terminal", [False, True])
def test_partitioning_tells_of_its_stages_where_there_is_no_terminal(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch, on_a_terminal: bool
) -> None:
    np.savetxt(tmp_path / "edges.txt", np.random.default_rng(0).integers(300, size=(2400, 2)), "%d")
    monkeypatch.setattr(graph_source, "LOG_SECONDS", 0.0)
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda _: on_a_terminal)
    level, handlers = sar.logger.level, list(sar.logger.handlers)
    options = ["--parts", "2", "--out", str(tmp_path / "parts"), "--method", "ldg"]
    assert main(["partition", str(tmp_path / "edges.txt"), *options]) == 0
    stages = stages_in(capsys.readouterr().err)
    if on_a_terminal:  # which has bars instead
        assert stages == []
    else:
        assert stages[-1] == "writing parts: 50 %"
        stages = [stage for stage in stages if "%" not in stage]
        assert stages[:2] == ["reading the input", "reading edges.txt"]
        assert "greedy passes" in stages
        assert len(set(stages)) == len(stages)
    assert (sar.logger.level, sar.logger.handlers) == (level, handlers)
