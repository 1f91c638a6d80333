"""The compiled loops, run as the Python they are written in: against the same oracles, with every bound checked.

This shows what the compiler cannot: reads beyond an array's end, and which lines no test reaches.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = {
    "kernels": ("rows", "aggregate", "gradients", "attention", "softmax"),
    "sampling": ("draws",),
    "partition": ("methods_streaming", "spring", "balance"),
}


@pytest.mark.slow
@pytest.mark.parametrize("folder", FILES)
def test_the_loops_are_right_without_the_compiler(folder):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "tests.kernels.plain_prefetch", "-k", "not reference-"]
    done = subprocess.run(
        [*command, "-W", "ignore::RuntimeWarning", *(f"tests/{folder}/test_{name}.py" for name in FILES[folder])],
        cwd=REPOSITORY,
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
