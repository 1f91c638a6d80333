"""The README's way from CSV files to a plan and a trained model works as it is printed."""

import glob
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import sar
from sar.cli import main
from tests.workers import REPOSITORY


@pytest.fixture
def block() -> str:
    """The commands."""
    [block] = re.findall(r"```sh\n(sar partition edges-.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    return str(block)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the files that the commands name."""
    rng = np.random.default_rng(0)
    for number in range(2):
        np.savetxt(tmp_path / f"edges-{number}.csv", rng.integers(0, 400, (1500, 2)), "%d", ",")
    np.save(tmp_path / "features.npy", rng.random((400, 6), dtype=np.float32))
    np.save(tmp_path / "labels.npy", rng.integers(0, 3, 400))
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sar.unpatch_dgl()


def test_the_commands_before_training(block: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each in this process, with patterns expanded as a shell does."""
    lines = [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]
    assert [line[:2] for line in lines[:3]] == [["sar", command] for command in ("partition", "inspect", "plan")]
    for _, *words in lines[:3]:
        assert main([name for word in words for name in sorted(glob.glob(word)) or [word]]) == 0
    said = capsys.readouterr().out
    assert "sound" in said
    assert "gat, widths 6 -> 256 -> 256 -> 3" in said


@pytest.mark.slow
def test_all_of_it_in_a_shell(block: str, folder: Path) -> None:
    """Word for word; on two cores, so that there are two workers."""
    (folder / "sar").write_text(f'#!/bin/sh\nexec {sys.executable} -m sar.cli "$@"\n')
    (folder / "sar").chmod(0o755)
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    done = subprocess.run(
        ["taskset", "-c", cores, "bash", "-e", "-c", block],
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sar launch: 2 workers" in done.stderr
    assert "accuracy" in done.stdout
