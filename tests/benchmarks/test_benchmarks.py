"""The benchmarks of full graphs from the command line to their tables and pictures, on tiny graphs."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from benchmarks import __main__ as main_benchmark
from benchmarks import growth, network, pyg, runs
from benchmarks.__main__ import dgl_way
from benchmarks.command import shown
from benchmarks.graphs import GeneratedSize, Prepared, prepare
from benchmarks.measure import Job, Measurement, Traffic
from benchmarks.report import write_section
from benchmarks.runs import Plan, Results, Run, Spread, in_bfloat16
from sar.errors import SarError
from tests.workers import REPOSITORY

SIZES = {"nodes": 300, "edges": 2000, "features": 8, "workers": 2, "repeats": 1, "epochs": 1, "warm-up": 1}
TINY = ["--models", "SAGE", *(word for name, value in SIZES.items() for word in (f"--{name}", str(value)))]
PAGE = "# Benchmarks\n\nWritten by hand.\n\n<!-- generated: rmat -->\nold\n<!-- end: rmat -->\n\nAlso by hand.\n"


def benchmark(module: str, *arguments: str | Path, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout, check=False)


def measured(seconds: float, rise: int, num_nodes: int = 500, loss: float = 1.0) -> Measurement:
    traffic = Traffic(sent=50e6, received=60e6, waited=0.1, dense=0.4, aggregation=0.1)
    return Measurement(num_nodes, [2 * loss, loss], [seconds, 9 * seconds, seconds], rise, traffic)


def made_up(folder: Path, edges: int = 1000, seconds: float = 1.0) -> Results:
    """Two repeats of one model on 1 and 2 workers; the second repeat is on a machine half as fast."""
    graph = prepare("rmat", GeneratedSize(200, 1000, 4), folder, folder, 0)
    results = Results(Prepared("rmat", graph.graph._replace(src=graph.graph.src.repeat(edges // 1000)), folder))
    for slower in (1, 2):
        single = [measured(2 * slower * seconds, 100_000_000, num_nodes=1000)]
        results.runs.setdefault(("SAGE", dgl_way(0)), []).append(Run(single, single))
        for workers in (1, 2):
            processes = [measured(slower * seconds, 60_000_000 + 10_000_000 * rank) for rank in range(workers)]
            results.runs.setdefault(("SAGE", dgl_way(workers)), []).append(Run(processes, single))
    return results


@pytest.mark.slow
def test_the_whole_path(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "benchmarks.md"
    page.parent.mkdir()
    page.write_text(PAGE)
    done = benchmark("benchmarks", *TINY, "--graph", "rmat", "--modes", "1", "3", "--docs", page.parent)
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert text.startswith(
        "# Benchmarks\n\nWritten by hand.\n\n<!-- generated: rmat -->\n\n**rmat**: 300 nodes, 2,300 edges"
    )
    assert text.endswith("<!-- end: rmat -->\n\nAlso by hand.\n")
    assert "old" not in text
    assert str(tmp_path) not in text
    assert f"`python -m benchmarks {' '.join(TINY)} --graph rmat --modes 1 3`" in text
    assert re.search(r"\| SAGE +\| 2 workers, sar \| +3 \| +\d", text)
    assert imread(page.parent / "benchmarks-rmat.png").std() > 0


@pytest.mark.slow
@pytest.mark.parametrize("module", ["pyg", "growth", "accuracy"])
def test_the_whole_path_of_others(tmp_path: Path, module: str) -> None:
    sizes = {"growth": ["--sizes", "20000", "40000"], "accuracy": ["--graph", "cora", "--repeats", "2"]}.get(module, [])
    done = benchmark(f"benchmarks.{module}", *TINY, *sizes, "--docs", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\|.* SAGE.*$", (tmp_path / "benchmarks.md").read_text(), re.MULTILINE)
    assert len(rows) == {"pyg": 3, "growth": 2, "accuracy": 1}[module]


def test_ratios_are_taken_within_a_repeat(tmp_path: Path) -> None:
    results = made_up(tmp_path)
    header, *_, row = main_benchmark.table(results)
    cells = dict(zip(header, row, strict=True))
    assert cells["trained by"] == "2 workers, sar"
    assert cells["s / epoch"] == "1.50 (1.00-2.00)"  # medians of the epochs, then of the repeats
    assert (cells["/ DGL"], cells["MB at peak"], cells["share"], cells["MB sent"]) == ("0.50", "70", "1.40", "50.0")
    assert pyg.table(results)[-1][2:] == ("1.500 (1.000-2.000)", "0.50", "70", "1.40")
    assert main_benchmark.bars(results)["SAGE"]["seconds / epoch"] == {
        "DGL": 3.0,
        "W = 1, mode 1": 1.5,
        "W = 2, mode 1": 1.5,
    }


@pytest.mark.parametrize("supported", [False, True])
def test_times_in_bfloat16_need_its_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supported: bool
) -> None:
    monkeypatch.setattr(main_benchmark, "multiplies_bfloat16", lambda: supported)
    results = made_up(tmp_path)
    results.runs["SAGE", in_bfloat16(dgl_way(1))] = results.runs["SAGE", dgl_way(1)]
    header, *_, row = main_benchmark.table(results)
    cells = dict(zip(header, row, strict=True))
    assert (cells["trained by"], cells["MB at peak"]) == ("1 worker, sar, bfloat16", "60")
    assert cells["/ DGL"] == ("0.50" if supported else "")


def test_spread_shows_what_varies() -> None:
    assert Spread.of([1.2, 1, 2]).text() == "1.20 (1.00-2.00)"
    assert Spread.of([1.5]).text() == "1.50"


def test_a_run_with_other_losses_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(target: Callable[..., Any], *_: Any, n_workers: int, **__: Any) -> list[Measurement]:
        return [measured(1, 1, loss=1.0 if target is runs.measure.single else 1.1)] * n_workers

    monkeypatch.setattr(runs, "run_workers", pretend)
    graph = prepare("rmat", GeneratedSize(50, 200, 4), tmp_path, tmp_path, 0)
    plan = Plan(["SAGE"], [dgl_way(0), dgl_way(2)], 1, Job("", 0, 0, 2, 0), 2, 60)
    with pytest.raises(SarError, match=r"SAGE, 2 workers, sar: a loss differs by 2.00e-01"):
        runs.run_all(graph, plan)
    rounded = replace(plan, job=replace(plan.job, wire="bfloat16"))
    assert len(runs.run_all(graph, rounded).runs) == 2


def test_sections_are_replaced_or_appended(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    for text in ("first", "second"):
        write_section(page, "rmat", text)
        write_section(page, "new", text)
    old, new = (f"<!-- generated: {name} -->\n\nsecond\n\n<!-- end: {name} -->" for name in ("rmat", "new"))
    assert page.read_text() == PAGE.replace("<!-- generated: rmat -->\nold\n<!-- end: rmat -->", old) + f"\n{new}\n"


def test_shown_commands_name_no_folders() -> None:
    argv = ["--work", "/a/b", "--models", "GAT", "--docs=/c", "--data", "/d"]
    assert shown("benchmarks", argv) == "`python -m benchmarks --models GAT`"


def test_growth_fits_exponents(tmp_path: Path) -> None:
    edges = [10**6, 2 * 10**6, 4 * 10**6]
    panels = growth.panels([made_up(tmp_path, 1000 * place, 2.0**place) for place in range(1, 4)])
    rows = [row for row in growth.table(edges, panels) if row[0] == "SAGE, 2 workers"]
    assert [row[-1] for row in rows] == ["1.00", "0.00"]


def test_network_table_compares_with_the_bound(tmp_path: Path) -> None:
    header, *rows = network.table(made_up(tmp_path), bandwidth=50e6)
    row = dict(zip(header, rows[1], strict=True))
    assert row["workers"] == "2, mode 1"
    assert (row["MB sent"], row["wire (s)"], row["bound (s)"]) == ("60.0", "1.20", "1.60")  # 0.4 + max(0.1, 1.2)
    assert row["/ bound"] == "0.94 (0.62-1.25)"


@pytest.mark.slow
def test_the_network_is_as_slow_as_asked(tmp_path: Path) -> None:
    reason = network.obstacle()
    if reason is not None:
        pytest.skip(reason)
    interfaces = os.listdir("/sys/class/net")
    done = benchmark("benchmarks.network", *TINY, "--gbit", "0.01", "--docs", tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "benchmarks.md").read_text()
    [cells] = re.findall(r"^\| SAGE.*$", page, re.MULTILINE)
    _, _, _, seconds, _, _, _, _, wire, *_ = (cell.strip() for cell in cells.split("|"))
    assert float(seconds) > 0.8 * float(wire) > 0
    assert os.listdir("/sys/class/net") == interfaces
    assert "0.01 Gbit/s" in page
