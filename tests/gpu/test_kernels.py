"""The kernels in Triton on a GPU, against plain torch and the oracles of the other backends."""

from pathlib import Path

import pytest

from tests.kernels.test_triton import pytestmark, run  # noqa: F401  a mark of this module, too

CASES = ("triton_cases.py", "test_aggregate.py", "test_gradients.py", "test_softmax.py", "test_attention.py")


@pytest.mark.gpu
@pytest.mark.parametrize("file", CASES)
def test_on_a_gpu(file: str, tmp_path: Path) -> None:
    names = "" if file == "triton_cases.py" else "numba-1"
    run(file, "-p", "tests.gpu.carried", "-k", names, cache=tmp_path, CARRIED_TO="cuda")


def test_carrying_to_the_cpu(tmp_path: Path) -> None:
    """In Triton's interpreter."""
    names = "projection or hubs or dtype1 or 2-3-5-40-0.4"
    plugin = "-p", "tests.gpu.carried", "-W", "ignore::RuntimeWarning", "-m", "not slow", "-k", names
    run("triton_cases.py", *plugin, cache=tmp_path, CARRIED_TO="cpu", TRITON_INTERPRET="1")
