"""The benchmark of mini-batches: its numbers from made-up runs, and the whole path on tiny graphs."""

from pathlib import Path

import pytest

from benchmarks import minibatch
from benchmarks.minibatch import DISTDGL, LOADERS, SAR, Run
from benchmarks.minibatch_training import Measured
from tests.benchmarks.test_benchmarks import benchmark


def run(seconds: float, servers: list[int]) -> Run:
    """Two trainers, the second of which is slower; two batches of 100 seeds in an epoch."""
    trainers = [Measured([slower * seconds] * 3, [0.25 * seconds] * 3, 2, 200, 100_000_000) for slower in (1, 2)]
    return Run(trainers, servers)


def test_time_and_memory() -> None:
    """The second repeat is on a machine half as fast."""
    sizes = [50_000_000, 60_000_000]
    runs = {SAR: [run(0.5, []), run(1.0, [])], DISTDGL: [run(1.0, sizes), run(2.0, sizes)]}
    header, *rows = minibatch.table(runs, batch_size=100)
    first, second = (dict(zip(header, row, strict=True)) for row in rows)
    assert first["s / epoch"] == "1.50 (1.00-2.00)"
    assert (first["/ DistDGL"], second["/ DistDGL"]) == ("0.50", "1.00")
    assert first["batches / s"] == "3.0 (2.0-4.0)"  # 400 seeds in 1 or 2 s
    assert first["fetching"] == "93.8 (62.5-125.0)"
    assert first["computing"] == "281.2 (187.5-375.0)"
    assert first["ms a batch"] == "375.0"
    assert (first["MB of a server"], second["MB of a server"]) == ("", "60")
    assert minibatch.table({SAR: runs[SAR]}, batch_size=100)[1][2] == ""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_path(tmp_path: Path) -> None:
    sizes = {"nodes": 300, "edges": 2000, "features": 8, "batch-size": 50, "repeats": 1, "epochs": 1}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    done = benchmark("benchmarks.minibatch", *options, "--docs", tmp_path, timeout=500)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "benchmarks.md").read_text()
    assert all(f"| {loader} " in page for loader in LOADERS)
