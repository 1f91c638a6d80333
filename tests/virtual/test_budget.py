"""Workers that share a process keep a budget of memory, and say what is missing if a partition does not fit."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from benchmarks.control_group import control_group
from sar.errors import ConfigError
from sar.host.memory import anonymous_memory
from sar.outofcore import residency
from tests.virtual.test_small_memory import SCRIPT, make
from tests.virtual.virtual_pool import VirtualPool
from tests.workers import REPOSITORY

MEGA = 2**20


def takes(megabytes: int, budget: int) -> str:
    """The error of a worker that makes a tensor, if there is one."""
    here = residency_of_this_worker()
    here.file.disk.limit = anonymous_memory() + budget * MEGA
    try:
        torch.empty(megabytes * MEGA // 4)
    except ConfigError as error:
        return str(error)
    finally:
        here.file.disk.limit = float("inf")
    return ""


def residency_of_this_worker() -> residency.Residency:
    file = residency.spillable.tensor_file.value
    assert isinstance(file, residency.Residency)
    return file


@pytest.mark.parametrize("megabytes, enough", [(20, True), (60, False)])
def test_memory_of_its_own(megabytes: int, enough: bool) -> None:
    for said in VirtualPool(1, 2).run(takes, megabytes, 40):
        assert enough == (said == "")
        assert enough or ("MB more than the" in said and "sar plan DIR --memory SIZE" in said)


NODES, WIDTH = 100_000, 1000  # features of 400 MB


@contextlib.contextmanager
def peak_of_a_group() -> Iterator[tuple[Path, list[int]]]:
    """A control group without a limit that matters, and its peak in bytes."""
    peak: list[int] = []
    with control_group(8 * 2**30) as group:
        yield group, peak
        file = next(group / name for name in ("memory.max_usage_in_bytes", "memory.peak") if (group / name).exists())
        peak.append(int(file.read_text()))


@pytest.mark.slow
def test_a_control_group(tmp_path: Path) -> None:
    """Page cache counts, too."""
    make(tmp_path, NODES, WIDTH)
    script = tmp_path / "train.py"
    script.write_text("import os, sys; open(sys.argv[3] + '/cgroup.procs', 'w').write(str(os.getpid()))\n" + SCRIPT)

    def train(budget: int) -> tuple[int, str, int]:
        with peak_of_a_group() as (group, peak):
            options = ["--memory", f"{budget}B", "--spill", tmp_path]
            words = [*options, script, tmp_path / "parts", "0", group]
            done = subprocess.run(
                [sys.executable, "-m", "sar.cli", "launch", *map(str, words)],
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
                capture_output=True, text=True, timeout=200, check=False,
            )  # fmt: skip
        return done.returncode, done.stdout + done.stderr, peak[0]

    try:
        with ThreadPoolExecutor() as jobs:  # beside each other, on one disk
            both = list(jobs.map(train, [budget := 700 * MEGA] * 2))
        losses = [re.findall(r"^loss .*", said, re.MULTILINE) for _, said, _ in both]
        for status, said, peak in both:
            assert status == 0, said
            assert peak < budget
        assert len(losses[0]) == 3
        assert losses[0] == losses[1]
        status, said, _ = train(250 * MEGA)  # less than the code takes
    except ConfigError as refused:
        pytest.skip(str(refused))
    assert status != 0
    assert "MB more than the" in said
    assert sorted(file.name for file in tmp_path.iterdir()) == ["parts", "train.py"]
