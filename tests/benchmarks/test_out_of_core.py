"""The benchmark out of core: the whole path on a tiny graph."""

import re
from pathlib import Path

import pytest

from benchmarks.out_of_core import PICTURE
from tests.benchmarks.test_benchmarks import benchmark


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_whole_path(tmp_path: Path) -> None:
    sizes = "--nodes", "3000", "--edges", "20000", "--features", "16", "--models", "SAGE", "--parts", "3"
    work = tmp_path / "work"  # a folder for spilled tensors must be on a disk
    done = benchmark("benchmarks.out_of_core", *sizes, "--epochs", "2", "--work", work, "--docs", tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out_of_core.md").read_text()
    assert re.search(r"^\| SAGE +\| in memory +\|.* 1 \|", page, re.MULTILINE)
    assert re.search(r"^\| SAGE +\| 3 +\|.*1 / ", page, re.MULTILINE)
    assert (tmp_path / PICTURE).stat().st_size > 10_000
