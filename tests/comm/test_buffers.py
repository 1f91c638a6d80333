"""Message buffers are used again during an exchange, and leave the process after it, whatever the allocator."""

import os
from pathlib import Path

import pytest
import torch

import sar
from sar.comm.rows import BufferPool

CPU = torch.device("cpu")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_more_than_the_budget_is_kept(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(sar.Config, "comm_buffer_bytes", 1000)
    pool = BufferPool(torch.device(device))
    buffers = [pool.take(400) for _ in range(4)]
    for buffer in [*buffers, pool.take(0)]:
        pool.give(buffer)
    assert pool.bytes_kept == 800
    pool.shrink(0)
    assert pool.bytes_kept == 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("size", [2**18, 2**21 + 2**20])
def test_memory_goes_back(size: int) -> None:
    """Also where a block that was made later is still in use, which would keep the heap below it."""
    pool = BufferPool(CPU)
    before = resident()
    buffers = [pool.take(size).fill_(1) for _ in range(2**25 // size)]
    later = torch.ones(2**15)
    for buffer in buffers:
        pool.give(buffer)
    del buffers, buffer
    full = resident()
    pool.shrink(0)
    assert full - before > 20e6
    assert full - resident() > 20e6
    assert later.sum() == 2**15
