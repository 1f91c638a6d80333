"""The kernels in plain torch on a GPU, against the oracles of the other backends."""

import os

import pytest

from tests.python_process import run

CASES = ("test_aggregate.py", "test_gradients.py", "test_softmax.py", "test_attention.py")


def run_carried(file: str, device: str, names: str) -> None:
    options = "-q", "-x", "-p", "no:cacheprovider", "-p", "tests.gpu.carried", "--hypothesis-profile", "fast"
    environment = {**os.environ, "CARRIED_TO": device}
    done = run("-m", "pytest", *options, "-k", names, f"tests/kernels/{file}", timeout=280, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("file", CASES)
def test_on_a_gpu(file: str) -> None:
    run_carried(file, "cuda", "reference-1")


def test_carrying_to_the_cpu() -> None:
    run_carried("test_aggregate.py", "cpu", "reference-1")
