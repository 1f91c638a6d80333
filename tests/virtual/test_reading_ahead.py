"""Of published rows that the system has dropped, those asked for come back, and no others.

The system is not asked where the process has not read from a disk for some turns.
"""

import ctypes
import os
import time
from types import SimpleNamespace

import pytest
import torch

from sar.outofcore.residency import Residency
from sar.outofcore.spill import PAGE, QUIET_TURNS, Published, SpillFile
from sar.spillable import empty_spillable
from sar.tensor_views import as_numpy

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


def test_nothing_is_asked_for_while_no_disk_is_read(published):
    if resident(published):
        pytest.skip("this file system keeps what it is told to drop")
    published.slot.file.quiet = QUIET_TURNS
    published.will_need(torch.tensor([50, 700, 3000]))
    time.sleep(0.3)
    assert not resident(published)


def test_turns_are_counted_in_which_no_disk_is_read(published):
    if resident(published):
        pytest.skip("this file system keeps what it is told to drop")
    file = published.slot.file
    residency = Residency(file, 1.0)
    residency.leave()
    assert file.quiet == 0  # what this process has read so far is new
    for _ in range(20):  # another test's thread may read
        residency.leave()
    assert file.quiet > 0
    assert published.rows[1000:1100, 5].tolist() == list(range(1000, 1100))
    residency.leave()
    assert file.quiet == 0


def test_compiled_code_has_its_operands_at_hand(published):
    residency = Residency(published.slot.file, 1.0)
    with residency.in_thread():
        mine = empty_spillable((100, 100), torch.float32, zeros=True)
        (mapping,) = residency._in_file.values()
        residency.leave()
        assert mapping.away
        as_numpy(mine)
        assert not mapping.away


def test_few_faults_do_not_count(published, monkeypatch):
    residency = Residency(published.slot.file, 1.0)
    for faults, quiet in ((100, 0), (101, 1), (160, 2), (224, 0), (224, 1)):
        usage = SimpleNamespace(ru_inblock=0, ru_majflt=faults)
        monkeypatch.setattr("sar.outofcore.residency.getrusage", lambda _, usage=usage: usage)
        residency.leave()
        assert published.slot.file.quiet == quiet
