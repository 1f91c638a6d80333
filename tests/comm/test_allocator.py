"""Freed memory goes back or stays, as `Config.allocator` says, and what the user has set is left alone."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from sar.comm import allocator
from sar.errors import ConfigError

MEASURE = """
import os, threading
from pathlib import Path
import torch
import sar
from sar.comm.allocator import set_allocator

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def free_all_but_one():
    before = resident()
    blocks = [torch.ones(1_250_000) for _ in range(16)]
    del blocks[:-1]  # the last one keeps the heap below it
    print(resident() - before)

set_allocator()
if "BATCHES" in os.environ:
    set_allocator(batches=True)
torch.ones(1000)  # loads code
before = resident()
torch.ones(25_000_000)
print(resident() - before)
torch.ones(7_500_000)  # glibc now takes blocks of up to this size from the heap, if nothing forbids it
free_all_but_one()
thread = threading.Thread(target=free_all_but_one)
thread.start()
thread.join()
"""

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")


def measure(**variables: str) -> list[int]:
    """Bytes that stay of a block of 100 MB, and of 16 blocks of 5 MB, all but one freed, in this and another thread."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "THP_"))}
    command = [sys.executable, "-c", MEASURE]
    done = subprocess.run(command, env=clean | variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.splitlines()]


NOTHING, ONE_BLOCK, ALL_BLOCKS, LARGE_BLOCK = (-2e6, 2e6), (3e6, 10e6), (60e6, 100e6), (95e6, 110e6)


@needs_glibc
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SAR_ALLOCATOR": "auto"}, [NOTHING, ONE_BLOCK, ONE_BLOCK]),
        ({"SAR_ALLOCATOR": "system"}, [NOTHING, ALL_BLOCKS, ALL_BLOCKS]),
        ({"SAR_ALLOCATOR": "auto", "BATCHES": "1"}, [LARGE_BLOCK]),  # from the first loader on
        ({"SAR_ALLOCATOR": "kept"}, [LARGE_BLOCK, NOTHING, ALL_BLOCKS]),  # the main thread finds room in what is kept
        ({"MALLOC_ARENA_MAX": "8"}, [NOTHING, ALL_BLOCKS]),  # what the user sets is left alone
    ],
    ids=str,
)
def test_freed_memory(variables: dict[str, str], expected: list[tuple[float, float]]) -> None:
    stays = measure(**variables)
    assert all(least <= found <= most for found, (least, most) in zip(stays, expected, strict=False)), stays


FAULTS = """
import resource
import sar
import torch, torch_geometric  # which makes a tensor
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.full((2**24,), 1.0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@needs_glibc
@pytest.mark.skipif(not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="no huge pages here")
def test_large_tensors_have_huge_pages() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("THP_")}
    faults = subprocess.check_output([sys.executable, "-c", FAULTS], env=environment, timeout=120)
    assert int(faults) < 2**24 * 4 / 4096 / 4, "without huge pages, there is a fault for each page of 4096 bytes"


def test_virtual_workers_need_that_of_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "left_alone", lambda environ: "another allocator is loaded")
    with pytest.raises(ConfigError, match="need glibc's allocator, but another allocator is loaded"):
        allocator.set_allocator(spilled=True)
