"""The kernels in plain torch on a GPU, against the oracles of the other backends."""

import os
import subprocess
import sys

import pytest

from tests.workers import REPOSITORY

CASES = ("test_aggregate.py", "test_gradients.py", "test_softmax.py", "test_attention.py")


def run_carried(file: str, device: str, names: str) -> None:
    options = "-q", "-x", "-p", "no:cacheprovider", "-p", "tests.gpu.carried", "--hypothesis-profile", "fast"
    environment = {**os.environ, "CARRIED_TO": device}
    command = [sys.executable, "-m", "pytest", *options, "-k", names, f"tests/kernels/{file}"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("file", CASES)
def test_on_a_gpu(file: str) -> None:
    run_carried(file, "cuda", "reference-1")


def test_carrying_to_the_cpu() -> None:
    run_carried("test_aggregate.py", "cpu", "reference-1")
