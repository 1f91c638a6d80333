"""Measures the speed of the disk for spilled tensors, for plans."""

import mmap
import os
import time
from pathlib import Path
from typing import NamedTuple

from sar.outofcore.spill import Disk, SpillFile

_SECONDS = 0.5  # for each direction
_BLOCK, _FILE = 2**23, 2**28  # bytes of a transfer, and of the file


class DiskSpeed(NamedTuple):
    """Bytes that a disk writes and reads per second, bypassing the page cache."""

    written: float
    read: float

    @classmethod
    def measure(cls, folder: Path) -> "DiskSpeed":
        """Measure the speed for a second, with an unnamed file. Raises the errors of `SpillFile`."""
        file, block = SpillFile(folder, Disk(0)), mmap.mmap(-1, _BLOCK)
        block.write(os.urandom(_BLOCK))  # some disks compress
        speeds, size = [], _FILE
        try:
            slot = file.slot(_FILE)
            for move in (os.pwritev, os.preadv):
                done, start = 0, time.perf_counter()
                while (seconds := time.perf_counter() - start) < _SECONDS:
                    file.transfer(move, memoryview(block), slot.begin + done % size, direct=True)
                    done += _BLOCK
                speeds.append(done / seconds)
                size = min(size, done)  # only read what was written
        finally:
            file.close()
        return cls(*speeds)
