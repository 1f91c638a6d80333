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

from sar.comm.transport import Letters
from sar.config import Config
from sar.outofcore.spill import PAGE, SpillFile


class Transfer:
    """A transfer between memory and a file, in the file's thread."""

    def __init__(self, future: "Future[None]", memory: Tensor) -> None:
        self._future = future
        self._memory = memory  # must stay alive until the end

    def wait(self) -> None:
        """Wait for the end, and raise the OSError if it has failed."""
        self._future.result(Config.timeout)


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
        return self._start(os.pwritev, key, message)

    def read(self, key: Any, message: Tensor) -> Transfer:
        self._file.read += self._places[key][1]
        return self._start(os.preadv, key, message)

    def _start(self, transfer: Any, key: Any, message: Tensor) -> Transfer:
        begin, nbytes = self._places[key]
        address, whole = message.data_ptr(), -(-nbytes // PAGE) * PAGE
        direct = (
            self._file.direct is not None
            and self._file.disk.exceeds_cache
            and address % PAGE == 0
            and whole <= message.nbytes
        )
        file, nbytes = (self._file.direct, whole) if direct else (self._file.fd, nbytes)
        memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
        offset = self._slot.begin + begin

        def run() -> None:
            done = 0
            while done < nbytes:
                count = transfer(file, [memory[done:]], offset + done)
                if not count:
                    raise OSError(f"the file of spilled tensors ends at {offset + done}")
                done += count

        return Transfer(self._file.disk.threads.submit(run), message)
