"""Freed memory goes back to the system where it is much, and stays where the user wants that."""

import os
import platform
import subprocess
import sys

import pytest

FREE_ALL_BUT_ONE = """
import os, sys
from pathlib import Path
import torch, sar
from sar.comm.allocator import give_back
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
sar.Config.keep_free = eval(sys.argv[1])
torch.ones(7_500_000)  # glibc now takes blocks of up to this size from the heap
blocks = [torch.ones(1_000_000) for _ in range(30)]
full = resident()
del blocks[:-1]  # the last one keeps the heap below it
give_back()
print(full - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's")
@pytest.mark.parametrize(
    ("keep_free", "least", "most"), [("0.1", 100e6, 130e6), ("None", -5e6, 5e6), ("1e6", -5e6, 5e6)]
)
def test_much_freed_memory_goes_back(keep_free: str, least: float, most: float) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", FREE_ALL_BUT_ONE, keep_free]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert least <= int(done.stdout) <= most
