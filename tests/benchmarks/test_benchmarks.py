"""The benchmarks from the command line to their tables and pictures, on tiny graphs."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from benchmarks import __main__ as main_benchmark
from benchmarks import growth, network, runs
from benchmarks.command import shown
from benchmarks.graphs import GeneratedSize, prepare
from benchmarks.measure import Construction, Job, Measurement, Traffic
from benchmarks.npz import write_npz
from benchmarks.report import cost_table, write_section
from benchmarks.results import SINGLE, Results, Run, load, save
from benchmarks.runs import Plan
from benchmarks.studies import wire
from benchmarks.summary import Spread, summarise
from sar.cli.demo import community_graph
from sar.errors import ConfigError, SarError
from tests.workers import REPOSITORY

SIZES = {"nodes": 300, "edges": 2000, "features": 8, "workers": 2, "repeats": 1, "epochs": 1, "warm-up": 1}
TINY = ["--models", "SAGE", *(word for name, value in SIZES.items() for word in (f"--{name}", str(value)))]
PAGE = "# Benchmarks\n\nWritten by hand.\n\n<!-- generated: rmat -->\nold\n<!-- end: rmat -->\n\nAlso by hand.\n"


def benchmark(module: str, *arguments: str | Path, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout, check=False)


def measured(seconds: float, rise: int, worker: bool = True, loss: float = 1.0) -> Measurement:
    construction = Construction(0.5, 0.25, 0.5, 20_000_000, 10_000_000) if worker else None
    traffic = Traffic(50e6, 60e6, 40_000_000, 0.1, 0.4, 0.1, 0.3, 0.2) if worker else None
    spent = [seconds, 9 * seconds, seconds]
    return Measurement(500, [2 * loss, loss], spent, 0.75 * seconds, 10**9, rise, construction, traffic)


def made_up(edges: int = 1000, seconds: float = 1.0) -> Results:
    """Two repeats of one model on 1 and 2 workers; the second repeat is on a machine half as fast."""
    found = Results("rmat", 1000, edges, 8, 4, {"machine": "none"})
    for repeat, slower in enumerate((1, 2)):
        single = replace(measured(2 * slower * seconds, 100_000_000, worker=False), num_nodes=1000)
        found.runs.append(Run("SAGE", SINGLE, 0, repeat, [single]))
        for workers in (1, 2):
            processes = [measured(slower * seconds, 60_000_000 + 10_000_000 * rank) for rank in range(workers)]
            found.runs.append(Run("SAGE", workers, 1, repeat, processes))
    return found


@pytest.mark.slow
def test_the_whole_path(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "benchmarks.md"
    page.parent.mkdir()
    page.write_text(PAGE)
    paths = "--work", tmp_path / "work", "--docs", page.parent
    done = benchmark("benchmarks", *TINY, "--graph", "rmat", "--modes", "1", *paths)
    assert done.returncode == 0, done.stderr

    text = page.read_text()
    assert text.startswith(
        "# Benchmarks\n\nWritten by hand.\n\n<!-- generated: rmat -->\n\n**rmat**: 300 nodes, 2,300 edges"
    )
    assert text.endswith("<!-- end: rmat -->\n\nAlso by hand.\n")
    assert "old" not in text
    assert str(tmp_path) not in text
    assert f"`python -m benchmarks {' '.join(TINY)} --graph rmat --modes 1`" in text
    assert re.search(r"\| SAGE +\| 2 workers, sar \| +1 \| +\d", text)

    [results] = load(tmp_path / "work" / "results.json")
    [run] = results.find("SAGE", 2, 1)
    row = summarise(results, "SAGE", 2, 1)
    assert sum(process.num_nodes for process in run.processes) == 300
    assert row.difference < 1e-4
    assert min(row.seconds.median, row.over_floor.median, row.share.median) > 0
    assert row.needed <= row.sent < 1.1 * row.needed
    for process in run.processes:
        assert process.construction is not None
        assert process.construction.load > 0
        assert 0 < process.traffic.waited < process.seconds[0]  # type: ignore[union-attr]

    picture = page.parent / "benchmarks-rmat.png"
    assert picture.stat().st_size < 100_000
    assert len(np.unique(imread(picture).reshape(-1, 4), axis=0)) > 50  # not blank
    picture.unlink()
    main_benchmark.main(["--from", str(tmp_path / "work" / "results.json"), "--docs", str(page.parent)])
    assert page.read_text() == text
    assert picture.exists()


def test_ratios_are_taken_within_a_repeat() -> None:
    row = summarise(made_up(), "SAGE", 2, 1)
    assert row.seconds == Spread(1.5, 1, 2)  # medians of the epochs, then of the repeats
    assert row.over_single == Spread(0.5, 0.5, 0.5)
    assert row.over_floor == Spread(3, 2, 4)
    assert row.cost == Spread(1, 1, 1)
    assert row.rise == [60e6, 70e6]
    assert row.share.median == pytest.approx(1.4)
    assert (row.sent, row.needed, row.difference) == (50e6, 40e6, 0)


def test_where_processor_seconds_go() -> None:
    """Of both workers together: 2 * 0.75 * 1.5 seconds, beside 0.75 * 3 * 1 of DGL's process."""
    header, row = cost_table(made_up())
    assert header == ("model", "1 process, DGL", "1 worker, sar", "2 workers, sar")
    assert row == ("SAGE", "2.25", "0.30 + 0.20 + 0.62", "0.60 + 0.40 + 1.25")


def test_spread_shows_what_varies() -> None:
    assert Spread.of([1.2, 1, 2]).text() == "1.20 (1.00-2.00)"
    assert Spread.of([1.5]).text() == "1.50"


def test_results_survive_their_file(tmp_path: Path) -> None:
    save([made_up()], tmp_path / "results.json")
    assert load(tmp_path / "results.json") == [made_up()]
    (tmp_path / "other.json").write_text(json.dumps([{"graph": 1}]))
    for file in ("other.json", "missing.json"):
        with pytest.raises(ConfigError, match="holds no results"):
            load(tmp_path / file)


def test_a_run_with_other_losses_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(target: Callable[..., Any], *_: Any, n_workers: int, **__: Any) -> list[Measurement]:
        single = target is runs.measure.single
        return [measured(1, 1, worker=not single, loss=1.0 if single else 1.1)] * n_workers

    monkeypatch.setattr(runs, "run_workers", pretend)
    graph = prepare("rmat", GeneratedSize(50, 200, 4), tmp_path, tmp_path, 0)
    plan = Plan(["SAGE"], [2], [1], 1, Job("", 0, 0, 2, 0.01, 0), 2, 60)
    with pytest.raises(SarError, match=r"W = 2, mode 1.* a loss differs by 2.00e-01"):
        list(runs.run_all(graph, plan, {}))
    rounded = replace(plan, job=replace(plan.job, wire="bfloat16"))
    assert len(list(runs.run_all(graph, rounded, {}))[-1].runs) == 2


def test_sections_are_replaced_or_appended(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    for text in ("first", "second"):
        write_section(page, "rmat", text)
        write_section(page, "new", text)
    old, new = (f"<!-- generated: {name} -->\n\nsecond\n\n<!-- end: {name} -->" for name in ("rmat", "new"))
    assert page.read_text() == PAGE.replace("<!-- generated: rmat -->\nold\n<!-- end: rmat -->", old) + f"\n{new}\n"


def test_the_page_has_a_place_for_every_section() -> None:
    page = (REPOSITORY / "docs" / "benchmarks.md").read_text()
    for name in ("rmat", *main_benchmark.REAL, "network", "growth", "minibatch", "wire"):
        assert page.index(f"<!-- generated: {name} -->") < page.index(f"<!-- end: {name} -->")


def test_shown_commands_name_no_folders() -> None:
    argv = ["--work", "/a/b", "--models", "GAT", "--docs=/c", "--from", "/d"]
    assert shown("benchmarks", argv) == "`python -m benchmarks --models GAT`"


def test_growth_fits_exponents_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save([made_up(edges, edges / 1e6) for edges in (10**6, 2 * 10**6, 4 * 10**6)], tmp_path / "growth.json")
    growth.main(["--from", str(tmp_path / "growth.json"), "--docs", str(tmp_path)])
    rows = [line.split()[-1] for line in capsys.readouterr().out.splitlines() if line.startswith("SAGE, 2 workers")]
    assert rows == ["1.00", "0.00"]
    assert "<!-- generated: growth -->" in (tmp_path / "benchmarks.md").read_text()
    assert (tmp_path / growth.PICTURE).stat().st_size < 100_000


def test_network_table_compares_with_the_bound() -> None:
    header, *rows = network.table(made_up(), bandwidth=50e6)
    row = dict(zip(header, rows[1], strict=True))
    assert row["workers"] == "2, mode 1"
    assert (row["MB sent"], row["wire (s)"], row["bound (s)"]) == ("60.0", "1.20", "1.60")  # 0.4 + max(0.1, 1.2)
    assert row["/ bound"] == "0.94 (0.62-1.25)"


@pytest.mark.parametrize(
    ("lacking", "reason"), [("root", "network namespaces need root"), ("tools", "ip, tc, mount not found")]
)
def test_network_says_why_it_does_not_run(
    lacking: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if lacking == "root":
        monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
        monkeypatch.setattr(network.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    network.main(["--docs", str(tmp_path)])
    assert reason in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_network_is_as_slow_as_asked(tmp_path: Path) -> None:
    reason = network.obstacle()
    if reason is not None:
        pytest.skip(reason)
    interfaces = os.listdir("/sys/class/net")
    paths = "--work", tmp_path / "work", "--docs", tmp_path
    done = benchmark("benchmarks.network", *TINY, "--gbit", "0.01", *paths)
    assert done.returncode == 0, done.stderr
    [results] = load(tmp_path / "work" / "network.json")
    [run] = results.find("SAGE", 2, 1)
    sent = max(process.traffic.sent for process in run.processes if process.traffic)
    assert runs.summary.seconds(run) > 0.8 * sent / 1.25e6
    assert os.listdir("/sys/class/net") == interfaces
    assert "0.01 Gbit/s" in (tmp_path / "benchmarks.md").read_text()


@pytest.mark.slow
def test_accuracy_with_every_wire(tmp_path: Path) -> None:
    write_npz(community_graph(300, 3000, num_features=8, num_classes=3), tmp_path / "mine.npz")
    short = "--workers", "2", "--seeds", "2", "--epochs", "2"
    done = benchmark("benchmarks.studies", "wire", "--graphs", tmp_path / "mine.npz", *short, "--docs", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line for line in (tmp_path / "benchmarks.md").read_text().splitlines() if line.startswith("| mine")]
    assert [row.count("±") for row in rows] == [4, 4]


def test_accuracies_are_compared_with_exact() -> None:
    exact = [0.8, 0.82]
    assert wire.cell(exact, exact) == "0.8100 ± 0.0141"
    assert wire.cell([0.8, 0.81], exact) == "0.8050 ± 0.0071, -0.0050"
