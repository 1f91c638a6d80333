"""Fixtures of the kernel tests: which implementation runs, and on how many threads."""

from collections.abc import Iterator

import pytest
import torch

from sar.kernels import attention, dispatch, edge_block
from sar.kernels.cpu import threads
from sar.kernels.torch import edge_chunks


@pytest.fixture
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that ask for it run with the kernels in plain torch, in chunks that cut small graphs apart."""
    monkeypatch.setattr(edge_chunks, "CHUNK_ELEMENTS", 500)
    for module in (attention, dispatch, edge_block):
        monkeypatch.setattr(module, "numba_kernels", lambda: None)


@pytest.fixture(params=["numba", "reference"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Every test that asks for it runs with the Numba kernels and as where Numba is not installed."""
    if request.param == "reference":
        request.getfixturevalue("plain_torch")
    else:
        assert dispatch.numba_kernels() is not None, "the tests need numba"
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
