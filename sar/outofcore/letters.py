"""Messages between the workers of a process in the spill file of their writer: [Note: rows of the same process].

A thread reads and writes while the worker computes, bypassing the page cache, which is too small for the messages of
all workers. Small messages, and file systems without O_DIRECT, use the cache.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from sar.outofcore.process_rows import Letters
from sar.outofcore.spill import PAGE, SpillFile, Transfer, memory_at


class LettersInFile(Letters):
    """Messages in a slot of a spill file."""

    on_disk = True

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
        return self._file.start(self._move, os.pwritev, key, message)

    def read(self, key: Any, message: Tensor) -> Transfer:
        self._file.read += self._places[key][1]
        return self._file.start(self._move, os.preadv, key, message)

    def _move(self, move: Callable[..., int], key: Any, message: Tensor) -> None:
        """Read or write a message. The thread keeps it and the slot alive, even if nobody waits after an error."""
        begin, nbytes = self._places[key]
        whole = -(-nbytes // PAGE) * PAGE
        direct = self._file.disk.exceeds_cache and message.data_ptr() % PAGE == 0 and whole <= message.nbytes
        memory = memory_at(message.data_ptr(), whole if direct else nbytes)
        self._file.transfer(move, memory, self._slot.begin + begin, direct=direct)
