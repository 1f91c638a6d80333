"""Fixtures of the kernel tests: which implementation runs, and on how many threads."""

from collections.abc import Iterator

import pytest
import torch

from sar.kernels import api, threads
from sar.kernels import torch as torch_kernels


@pytest.fixture
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that ask for it run with the kernels in plain torch, in chunks that cut small graphs apart."""
    monkeypatch.setattr(torch_kernels, "CHUNK_ELEMENTS", 500)
    monkeypatch.setattr(api, "COMPILED_DTYPES", ())
    monkeypatch.setattr(api, "_choose", api._choose.__wrapped__)  # neither finds nor leaves a kept choice


@pytest.fixture(params=["numba", "reference"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Every test that asks for it runs with the compiled kernels and with plain torch."""
    if request.param == "reference":
        request.getfixturevalue("plain_torch")
    name: str = request.param
    return name


@pytest.fixture(params=[1, 3])
def num_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Threads that kernels use, on graphs of any size."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(threads, "SERIAL_WORK", -1)
    yield request.param
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Plain torch on several threads is torch's own doing."""
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if given.get("implementation") == "reference" and given.get("num_threads") == 3:
            item.add_marker(pytest.mark.slow)
