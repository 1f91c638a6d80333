"""The allocator's settings do what they are for: freed blocks leave a process, or stay."""

import os
import platform
import subprocess
import sys

import pytest

from sar.host.allocator import ENVIRONMENT, KEPT

RESIDENT = """
import os
from pathlib import Path
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
def block(size):
    return b"x" * size
"""
FREE_ALL_BUT_ONE = """
block(30_000_000)  # by default, glibc now takes blocks of up to this size from the heap
before = resident()
blocks = [block(5_000_000) for _ in range(16)]
del blocks[:-1]  # the last one keeps the heap below it
print(resident() - before)
"""
FREE_ONE = """
before = resident()
block(100_000_000)
print(resident() - before)
"""

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")


def rise(program: str, settings: dict[str, str]) -> int:
    """What a process that runs the program prints: bytes."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", RESIDENT + program]
    return int(subprocess.run(command, env=clean | settings, capture_output=True, timeout=60, check=True).stdout)


@pytest.mark.parametrize(("settings", "least", "most"), [(ENVIRONMENT, 3e6, 20e6), ({}, 60e6, 100e6)])
def test_freed_blocks_are_not_kept(settings: dict[str, str], least: float, most: float) -> None:
    assert least <= rise(FREE_ALL_BUT_ONE, settings) <= most


@pytest.mark.parametrize(("settings", "least", "most"), [(KEPT, 95e6, 110e6), ({}, -1e6, 10e6)])
def test_freed_blocks_are_kept(settings: dict[str, str], least: float, most: float) -> None:
    assert least <= rise(FREE_ONE, settings) <= most
