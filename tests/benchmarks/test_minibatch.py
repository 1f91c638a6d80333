"""The benchmark of mini-batches: its numbers from made-up runs, and the whole path on tiny graphs."""

from pathlib import Path

import pytest

from benchmarks import minibatch
from benchmarks.minibatch import DISTDGL, KEEPING, SAR, SINGLE, Results, Run
from benchmarks.minibatch_training import Measured
from benchmarks.results import save
from sar.errors import ConfigError
from tests.benchmarks.test_benchmarks import benchmark


def run(loader: str, repeat: int, seconds: float, servers: list[int]) -> Run:
    """Two trainers, the second of which is slower; two batches of 100 seeds in an epoch."""
    trainers = [Measured([slower * seconds] * 3, [0.25 * seconds] * 3, 2, 200, 100_000_000) for slower in (1, 2)]
    return Run(loader, repeat, trainers, servers)


def made_up() -> Results:
    """The second repeat is on a machine half as fast."""
    results = Results("a graph", 100, {"command": "none"})
    for repeat, slower in enumerate((1, 2)):
        results.runs.append(run(SAR, repeat, slower * 0.5, []))
        results.runs.append(run(DISTDGL, repeat, slower * 1.0, [50_000_000, 60_000_000]))
    return results


def test_time_and_memory() -> None:
    header, *rows = minibatch.table(made_up())
    first, second = (dict(zip(header, row, strict=True)) for row in rows)
    assert first["s / epoch"] == "1.50 (1.00-2.00)"
    assert (first["/ DistDGL"], second["/ DistDGL"]) == ("0.50", "1.00")
    assert first["batches / s"] == "3.0 (2.0-4.0)"  # 400 seeds in 1 or 2 s
    assert first["fetching"] == "93.8 (62.5-125.0)"
    assert first["computing"] == "281.2 (187.5-375.0)"
    assert first["ms a batch"] == "375.0"
    assert (first["MB of a server"], second["MB of a server"]) == ("", "60")


def test_loaders_are_compared_with_distdgl_on_the_same_allocator() -> None:
    results = made_up()
    results.runs.append(run(SAR + KEEPING, 0, 0.3, []))
    results.runs.append(run(DISTDGL + KEEPING, 0, 0.4, [1]))
    header, *rows = minibatch.table(results)
    assert [row[header.index("/ DistDGL")] for row in rows] == ["0.50", "1.00", "0.75", "1.00"]


def test_results_survive_their_file(tmp_path: Path) -> None:
    save(made_up(), tmp_path / "minibatch.json")
    assert minibatch.load(tmp_path / "minibatch.json") == made_up()
    with pytest.raises(ConfigError, match="holds no results"):
        minibatch.load(tmp_path / "missing.json")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_path(tmp_path: Path) -> None:
    sizes = {"nodes": 300, "edges": 2000, "features": 8, "batch-size": 50, "repeats": 1, "epochs": 1}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    paths = "--work", tmp_path / "work", "--docs", tmp_path
    done = benchmark("benchmarks.minibatch", *options, "--memory", "default", "kept", *paths, timeout=500)
    assert done.returncode == 0, done.stderr
    results = minibatch.load(tmp_path / "work" / "minibatch.json")
    loaders = [SAR, DISTDGL, SINGLE]
    assert results.loaders == loaders + [loader + KEEPING for loader in loaders]
    assert len({sum(trainer.seeds for trainer in one.trainers) for one in results.runs}) == 1
    assert "| DistDGL" in (tmp_path / "benchmarks.md").read_text()
