"""Commands where DGL is not installed, against those beside DGL."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import sar
from sar.cli import main
from sar.cli.demo import community_graph
from sar.partition.in_memory import divide, training_graph
from tests.adapters.pyg.test_without_dgl import run
from tests.cli.test_demo import markdown_rows


def plan(folder: Path, model: str, capsys: pytest.CaptureFixture[str]) -> tuple[list[Any], list[int]]:
    """What `sar plan` says of each worker: what does not depend on who wrote the layers, and what they hold."""
    assert main(["plan", str(folder), "--model", model, "--hidden", "16", "--json"]) == 0
    workers = json.loads(capsys.readouterr().out)["workers"]
    held = [worker["memory"]["activations"] + worker["memory"]["buffers"] for worker in workers]
    for worker in workers:
        worker["memory"] = [worker["memory"][part] for part in ("data", "structure", "parameters")]
        del worker["above_baseline"]
    return workers, held


@pytest.mark.parametrize("model", ["sage", "gcn", "gat"])
def test_plan(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    divide(training_graph(community_graph(300, 2400, num_features=24, num_classes=4)), tmp_path, "g", 2)
    beside, theirs = plan(tmp_path, model, capsys)
    sar.unpatch_dgl()
    monkeypatch.setitem(sys.modules, "dgl", None)  # neither found nor imported
    without, ours = plan(tmp_path, model, capsys)
    assert without == beside
    assert ours == pytest.approx(theirs, rel=0.1)  # our layers keep somewhat less


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    options = ("--nodes", "600", "--degree", "12", "--epochs", "3", "--parts", "3", "--out", "out")
    run(["-m", "sar.cli", "demo", *options], tmp_path)
    rows = markdown_rows(tmp_path / "out" / "demo.md")
    assert [row["trained by"] for row in rows] == ["1 process, sar", "2 workers, sar", "1 process in 512 MiB, sar"] * 2
    for row in rows[1:3] + rows[4:]:
        assert row["test accuracy"] == rows[3 * (row["model"] == "GAT")]["test accuracy"]
        assert 0 < float(row["largest logit difference"]) < 1e-4
