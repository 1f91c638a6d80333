"""The allocator's settings do what they are for: freed blocks leave a process."""

import os
import platform
import subprocess
import sys

import pytest

from sar.cli.allocator import ENVIRONMENT

FREE_ALL_BUT_ONE = """
import os
from pathlib import Path
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
def block(size):
    return b"x" * size
block(30_000_000)  # by default, glibc now takes blocks of up to this size from the heap
before = resident()
blocks = [block(5_000_000) for _ in range(16)]
del blocks[:-1]  # the last one keeps the heap below it
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
@pytest.mark.parametrize(("settings", "least", "most"), [(ENVIRONMENT, 3e6, 20e6), ({}, 60e6, 100e6)])
def test_freed_blocks_are_not_kept(settings: dict[str, str], least: float, most: float) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", FREE_ALL_BUT_ONE]
    kept = subprocess.run(command, env=clean | settings, capture_output=True, text=True, timeout=60, check=True).stdout
    assert least <= int(kept) <= most
