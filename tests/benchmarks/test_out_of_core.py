"""The benchmark out of core: control groups, and the whole path on a tiny graph."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.out_of_core import PICTURE, control_group
from sar.errors import ConfigError
from tests.benchmarks.test_benchmarks import benchmark

TAKES = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))  # as the measured script does, without imports
bytes({}) + b"x"
"""


def test_a_control_group() -> None:
    try:
        with control_group(64) as group:
            statuses = [
                subprocess.run([sys.executable, "-c", TAKES.format(size), str(group)], timeout=60)
                for size in (2**24, 2**27)
            ]
    except ConfigError as refused:
        pytest.skip(str(refused))
    assert [done.returncode for done in statuses] == [0, -signal.SIGKILL]
    assert not group.exists()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("options", [("--epochs", "2"), ("--evaluate",)])
def test_the_whole_path(tmp_path: Path, options: tuple[str, ...]) -> None:
    sizes = "--nodes", "3000", "--edges", "20000", "--features", "16", "--models", "SAGE", "--parts", "3"
    work = tmp_path / "work"  # a folder for spilled tensors must be on a disk
    done = benchmark("benchmarks.out_of_core", *sizes, *options, "--work", work, "--docs", tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out_of_core.md").read_text()
    if "--evaluate" in options:
        [difference] = re.findall(r"\| SAGE +\| sar, 3 partitions \|.*\| +(\S+) \|$", page, re.MULTILINE)
        assert float(difference) < 1e-5
    else:
        assert re.search(r"^\| SAGE +\| in memory +\|.* 1 \|", page, re.MULTILINE)
        assert re.search(r"^\| SAGE +\| 3 +\|.*1 / ", page, re.MULTILINE)
        assert (tmp_path / PICTURE).stat().st_size > 10_000
