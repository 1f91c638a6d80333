"""What a process holds now: resident memory, file descriptors and threads."""

import ctypes
import gc
import os
from pathlib import Path
from typing import NamedTuple

MIB = 2**20


class Usage(NamedTuple):
    """Of one process; memory in bytes."""

    memory: int
    descriptors: int
    threads: int


def settled() -> Usage:
    """Of this process, without what it could give back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    memory = pages * os.sysconf("SC_PAGE_SIZE")
    return Usage(memory, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))


def assert_flat(early: Usage, late: Usage, growth: int) -> None:
    """Memory has grown by `growth` bytes at most, descriptors and threads not at all."""
    print(f"memory {early.memory / MIB:.1f} -> {late.memory / MIB:.1f} MiB, {late}")
    assert late.memory - early.memory <= growth
    assert late.descriptors <= early.descriptors
    assert late.threads <= early.threads
