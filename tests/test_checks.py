"""Lint, format and types, so that the test command covers what `make check` does."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCES = ("sar", "tests", "examples", "benchmarks", "tools", "setup.py")
CHECKS = {
    "lint": ("ruff", "check", "--no-cache", *SOURCES),
    "format": ("ruff", "format", "--check", "--no-cache", *SOURCES),
    "types": ("mypy",),
}


@pytest.mark.parametrize("check", CHECKS)
def test_sources_pass(check):
    command = [sys.executable, "-m", *CHECKS[check]]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
