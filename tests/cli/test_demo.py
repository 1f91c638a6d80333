"""`sar demo`, run as a user runs it."""

import itertools
import time
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from sar.adapters.dgl.shim import has_dgl
from sar.cli import main
from sar.cli.demo import MODELS
from tests.leftovers import marked_processes
from tests.matrix import corner
from tests.python_process import run
from tests.workers import ensure_fork_server

TRAINED_BY = f"1 process, {'DGL' if has_dgl() else 'sar'}", "2 workers, sar", "1 process in 450 MiB, sar"

HELD = "--memory", "450MiB"


def processes_left(before: set[str]) -> set[str]:
    """Processes that a demo started and that still live after a moment, which they take to end."""
    deadline = time.monotonic() + 5
    while (found := {*marked_processes()} - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def markdown_rows(file: Path) -> list[dict[str, str]]:
    """The rows of the first table in a Markdown file, by column."""
    lines = [line for line in file.read_text().splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(header, row, strict=True)) for row in rows]


@pytest.mark.parametrize("models", [["GAT"], corner(["GraphSAGE", "GAT"])], ids=len)
def test_demo_trains_compares_and_draws(
    tmp_path: Path, models: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ensure_fork_server()  # and what tracks resources of processes, which stays
    before = {*marked_processes()}
    monkeypatch.setattr("sar.cli.demo.MODELS", {model: MODELS[model] for model in models})
    out = tmp_path / "out"
    status = main(
        ["demo", "--nodes", "600", "--degree", "12", "--epochs", "3", "--parts", "3", *HELD, "--out", str(out)]
    )
    said, errors = capfd.readouterr()
    assert status == 0, errors
    assert processes_left(before) == set()
    assert "600 nodes, 7,800 edges with self-loops, 64 features, 8 classes" in said
    assert errors.count("3 epochs, loss ") == 3 * len(models)
    assert "%|" not in errors  # no bars where there is no terminal
    assert "validation 0." in errors

    rows = markdown_rows(out / "demo.md")
    assert [(row["model"], row["trained by"]) for row in rows] == list(itertools.product(models, TRAINED_BY))
    for model, single, *others in zip(models, rows[::3], rows[1::3], rows[2::3], strict=True):
        assert single["largest logit difference"] == ""
        for row in others:
            assert row["test accuracy"] == single["test accuracy"]
            assert float(row["largest logit difference"]) < 1e-4
        assert [row["MB sent / epoch"] == "-" for row in (single, *others)] == [True, False, True]
        for row in (single, *others):
            assert 0 < float(row["s / epoch"]) < 10
            assert float(row["peak memory (MB)"]) >= 0
            assert all(cell in said for cell in row.values())
        assert np.load(out / f"{model}.npy").shape == (600, 8)
        ratios = [line for line in said.splitlines() if line.startswith(f"{model}, 1 process in 450 MiB, sar: ")]
        assert len(ratios) == 1
        assert ratios[0] in (out / "demo.md").read_text()

    picture = imread(out / "demo.png")
    height, width, _ = picture.shape
    assert 300 < height < 1000
    assert width == 480 * (len(models) + 1)  # curves of each model, and bars
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 50  # not blank


def test_bfloat16_is_not_exact_and_the_demo_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sar.cli.demo.MODELS", {"GAT": MODELS["GAT"]})
    small = ["--nodes", "600", "--degree", "12", "--epochs", "1", *HELD, "--out", str(tmp_path)]
    assert main(["demo", "--bf16", *small]) == 0
    assert "bfloat16, by autocast, which is not exact" in capfd.readouterr().out
    single, workers, _ = markdown_rows(tmp_path / "demo.md")
    assert "bfloat16" not in single["trained by"]
    assert workers["trained by"].endswith("workers, sar, bfloat16")
    assert 1e-3 < float(workers["largest logit difference"]) < 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "nope"], "unknown data set 'nope'"),
        pytest.param(
            ["--dataset", "karate"],
            "'karate' has no node features",
            marks=pytest.mark.skipif(not has_dgl(), reason="a data set of DGL"),
        ),
        (["--epochs", "0"], "expected at least 1"),
    ],
)
def test_demo_ends_with_one_line_where_it_cannot_run(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments, "--out", str(tmp_path / "out")]) == 1
    ends_with_one_line(capsys.readouterr().err, message)
    assert not (tmp_path / "out").exists()


def test_demo_ends_its_processes_when_time_is_up(tmp_path: Path) -> None:
    ensure_fork_server()
    before = {*marked_processes()}
    options = ["--nodes", "300", "--time-limit", "0.5", "--out", str(tmp_path / "out")]
    done = run("-m", "sar.cli", "demo", *options, timeout=240)
    assert done.returncode == 1
    ends_with_one_line(done.stderr, "did not finish within 0.5 s")
    assert not (tmp_path / "out").exists()
    assert processes_left(before) == set()


def ends_with_one_line(errors: str, message: str) -> None:
    last = errors.splitlines()[-1]
    assert last.startswith("sar demo: ")
    assert message in last
    assert "Traceback" not in errors
