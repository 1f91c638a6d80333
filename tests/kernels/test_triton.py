"""The kernels in Triton without a GPU: run as Python by Triton's interpreter, and compiled for GPUs that are not there.

Triton decides when it is imported whether it interprets, so each takes a process of its own.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.matrix import corner
from tests.workers import REPOSITORY

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton comes with the extra `test` on Linux and Python 3.11 or later"
)

INTERPRETED = (
    pytest.param("triton_cases.py", "not slow", "", id="cases"),
    corner("triton_cases.py", "slow", ""),
    corner("test_aggregate.py", "", "numba-1 and not rows_are_added"),  # bfloat16 is cut there instead of rounded
    corner("test_gradients.py", "", "numba-1"),
    corner("test_softmax.py", "", "numba-1"),
    corner("test_attention.py", "", "numba-1 and result_and_gradients"),  # the others have many edges
)


@pytest.mark.parametrize("file, marks, names", INTERPRETED)
def test_interpreted(file: str, marks: str, names: str, tmp_path: Path) -> None:
    """Against plain torch and the oracles of the other backends."""
    plugin = "-p", "tests.kernels.triton_interpreted", "-W", "ignore::RuntimeWarning"
    run(file, *plugin, "-m", marks, "-k", names, cache=tmp_path, TRITON_INTERPRET="1")


@pytest.mark.parametrize("marks", ["not slow", corner("slow")])
def test_compiled(marks: str, tmp_path: Path) -> None:
    run("triton_compiled.py", "-m", marks, cache=tmp_path)


def run(file: str, *options: str, cache: Path, **more: str) -> None:
    """Run a file of tests, which must pass, in a new interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--hypothesis-profile", "fast"]
    done = subprocess.run(
        [*command, *options, f"tests/kernels/{file}"],
        cwd=REPOSITORY,
        env=environment | {"TRITON_CACHE_DIR": str(cache)} | more,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
