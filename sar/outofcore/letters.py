"""Messages between the workers of a process in the spill file of their writer: [Note: rows of the same process].

A thread reads and writes while the worker computes, past the page cache, which could not keep what all workers write.
Small messages, and file systems without O_DIRECT, go through the cache.
"""

import ctypes
import os
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from sar.outofcore.process_rows import Letters
from sar.outofcore.spill import PAGE, SpillFile


class Transfer:
    """A transfer between memory and a file, in one of the disk's threads."""

    def __init__(self, file: SpillFile, future: "Future[None]") -> None:
        self._file, self._future = file, future

    def wait(self) -> None:
        """Wait for the end. Raises a SpillError if the transfer has failed."""
        self._file.finish(self._future)


class LettersInFile(Letters):
    """Messages in a slot of a spill file."""

    def __init__(self, file: SpillFile, sizes: Mapping[Any, int]) -> None:
        self._file = file
        self._places: dict[Any, tuple[int, int]] = {}  # offset and size in bytes of each message
        end = 0
        for key, nbytes in sizes.items():
            self._places[key] = end, nbytes
            end += -(-nbytes // PAGE) * PAGE
        self._slot = file.slot(end)

    def write(self, key: Any, message: Tensor) -> Transfer:
        self._file.written += self._places[key][1]
        return Transfer(self._file, self._file.disk.threads.submit(self._transfer, os.pwritev, key, message))

    def read(self, key: Any, message: Tensor) -> Transfer:
        self._file.read += self._places[key][1]
        return Transfer(self._file, self._file.disk.threads.submit(self._transfer, os.preadv, key, message))

    def _transfer(self, transfer: Any, key: Any, message: Tensor) -> None:
        """Read or write a message. The thread keeps it and the slot alive, even if nobody waits after an error."""
        begin, nbytes = self._places[key]
        address, whole = message.data_ptr(), -(-nbytes // PAGE) * PAGE
        file, aligned = self._file.fd, address % PAGE == 0 and whole <= message.nbytes
        if aligned and self._file.direct is not None and self._file.disk.exceeds_cache:
            file, nbytes = self._file.direct, whole
        memory, done = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B"), 0
        while done < nbytes:
            count = transfer(file, [memory[done:]], self._slot.begin + begin + done)
            if not count:
                raise OSError("the file of spilled tensors ends too early")
            done += count
