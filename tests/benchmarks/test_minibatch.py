"""The benchmark of mini-batches: its numbers from made-up runs, and the whole path on tiny graphs."""

from pathlib import Path

import pytest

from benchmarks import minibatch
from benchmarks.minibatch import CACHED, DISTDGL, KEEPING, SAR, SINGLE, WHOLE, Part, Run
from benchmarks.minibatch_training import Measured
from benchmarks.results import save
from sar.cli.demo import community_graph
from sar.errors import ConfigError
from sar.partition.graph_data import write_npz
from tests.benchmarks.test_benchmarks import benchmark


def run(loader: str, repeat: int, seconds: float, accuracies: list[float], servers: list[int]) -> Run:
    """Two trainers, the second of which is slower; two batches of 100 seeds in an epoch."""
    trainers = [
        Measured([slower * seconds] * 3, [0.25 * seconds] * 3, 2, 200, accuracies, 100_000_000) for slower in (1, 2)
    ]
    return Run(loader, repeat, trainers, servers)


def made_up() -> list[Part]:
    """The second repeat is on a machine half as fast."""
    parts = [Part(f"graph {number}", 100, {"machine": "none"}) for number in range(2)]
    for repeat, slower in enumerate((1, 2)):
        for part in parts:
            part.runs.append(run(SAR, repeat, slower * 0.5, [0.5, 0.7, 0.8], []))
            part.runs.append(run(DISTDGL, repeat, slower * 1.0, [0.3, 0.78, 0.75], [50_000_000, 60_000_000]))
    return parts


def test_time_and_memory() -> None:
    header, *rows = minibatch.speed_table(made_up()[0])
    first, second = (dict(zip(header, row, strict=True)) for row in rows)
    assert first["s / epoch"] == "1.50 (1.00-2.00)"
    assert (first["/ DistDGL"], second["/ DistDGL"]) == ("0.50", "1.00")
    assert first["batches / s"] == "3.0 (2.0-4.0)"  # 400 seeds in 1 or 2 s
    assert first["fetching"] == "93.8 (62.5-125.0)"
    assert first["computing"] == "281.2 (187.5-375.0)"
    assert first["ms a batch"] == "375.0"
    assert (first["MB of a server"], second["MB of a server"]) == ("", "60")


def test_loaders_are_compared_with_distdgl_on_the_same_allocator() -> None:
    part = made_up()[0]
    part.runs.append(run(SAR + KEEPING, 0, 0.3, [0.5], []))
    part.runs.append(run(DISTDGL + KEEPING, 0, 0.4, [0.5], [1]))
    header, *rows = minibatch.speed_table(part)
    assert [row[header.index("/ DistDGL")] for row in rows] == ["0.50", "1.00", "0.75", "1.00"]


def test_seconds_to_an_accuracy_that_all_reach() -> None:
    header, *rows = minibatch.accuracy_table(made_up()[1])
    assert header[-1] == "s to 0.764"  # 0.98 * 0.78
    assert [row[-1] for row in rows] == ["4.50 (3.00-6.00)", "6.00 (4.00-8.00)"]
    assert [row[3:5] for row in rows] == [("0.8000", "0.8000"), ("0.7500", "0.7800")]


def test_results_survive_their_file(tmp_path: Path) -> None:
    save(made_up(), tmp_path / "minibatch.json")
    assert minibatch.load(tmp_path / "minibatch.json") == made_up()
    with pytest.raises(ConfigError, match="holds no results"):
        minibatch.load(tmp_path / "missing.json")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_path(tmp_path: Path) -> None:
    write_npz(community_graph(300, 3000, num_features=8, num_classes=3), tmp_path / "mine.npz")
    sizes = {"nodes": 300, "edges": 2000, "features": 8, "batch-size": 50, "real-batch-size": 20, "repeats": 1}
    sizes |= {"epochs": 1, "real-epochs": 2, "whole-epochs": 5}
    options = ["--memory", "default", "kept"]
    options += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    paths = "--work", tmp_path / "work", "--docs", tmp_path
    done = benchmark("benchmarks.minibatch", *options, "--real", tmp_path / "mine.npz", *paths, timeout=500)
    assert done.returncode == 0, done.stderr
    speed, accuracy = minibatch.load(tmp_path / "work" / "minibatch.json")
    loaders = [SAR, CACHED, DISTDGL, SINGLE]
    assert speed.loaders == loaders + [loader + KEEPING for loader in loaders]
    assert accuracy.loaders == [SAR, CACHED, DISTDGL, SINGLE, WHOLE]
    nodes_by_loader = {sum(trainer.seeds for trainer in one.trainers) for one in accuracy.runs}
    assert len(nodes_by_loader) == 1
    for one in accuracy.runs:
        assert len({tuple(trainer.accuracies) for trainer in one.trainers}) == 1
        assert one.trainers[0].accuracies[-1] > 0.4
    assert "| DistDGL" in (tmp_path / "benchmarks.md").read_text()
