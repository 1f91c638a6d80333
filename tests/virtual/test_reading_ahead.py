"""Of published rows that the system has dropped, those asked for come back, and no others."""

import ctypes
import os
import time

import pytest
import torch

from sar.outofcore.spill import PAGE, Published, SpillFile

ROWS = 4096
"""One in each page."""

libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def published(tmp_path):
    file = SpillFile(tmp_path)
    slot, values = file.slot(ROWS * PAGE), torch.arange(ROWS).repeat_interleave(PAGE // 8)
    slot.write(values.data_ptr())
    os.fdatasync(file.fd)
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    yield Published.of(slot, (ROWS, PAGE // 8), torch.int64)
    file.close()


def resident(published):
    """Which pages the system has in memory."""
    found = (ctypes.c_ubyte * (ROWS + 1))()
    begin = published.rows.data_ptr() // PAGE * PAGE
    pages = -(-(published.rows.data_ptr() + published.rows.nbytes - begin) // PAGE)
    assert libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(pages * PAGE), found) == 0
    return [page for page in range(pages) if found[page] & 1]


def test_one_row(published):
    if resident(published):
        pytest.skip("this file system keeps what it is told to drop")
    assert published.rows[1000, 5] == 1000
    assert len(resident(published)) <= 2  # where a row lies on two pages


def test_rows_asked_for(published):
    if resident(published):
        pytest.skip("this file system keeps what it is told to drop")
    published.will_need(torch.tensor([50, 700, 3000]))
    for _ in range(100):
        if len(resident(published)) >= 2951:
            break
        time.sleep(0.1)
    there = resident(published)  # maybe not all: it is advice, and a system short of memory drops what nobody has read
    assert len(there) > 1000
    assert set(there) <= set(range(50, 3002))
    assert published.rows[[50, 3000], 0].tolist() == [50, 3000]
