"""Memory for messages: used again and again during an exchange, and the system's again when that is over."""

import contextlib
import mmap

import torch
from torch import Tensor

from sar.config import Config

HUGE_PAGE = 2**21
"""Bytes from which on a buffer may have huge pages."""


class BufferPool:
    """Message buffers of one worker.

    In CPU memory each has a mapping of its own, because an allocator would keep most of what is freed: see
    docs/memory.md.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []

    @property
    def bytes_kept(self) -> int:
        """Bytes of the buffers that nobody uses now."""
        return sum(buffer.nbytes for buffer in self._free)

    def take(self, size: int) -> Tensor:
        """A buffer of at least `size` bytes (uint8), contents undefined."""
        fitting = [i for i, buffer in enumerate(self._free) if size <= buffer.nbytes <= 4 * size]
        if fitting:
            return self._free.pop(min(fitting, key=lambda i: self._free[i].nbytes))
        if self._device.type == "cpu" and size and hasattr(mmap, "MAP_PRIVATE"):
            return _map(size)
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def give(self, buffer: Tensor | None) -> None:
        """Hand a buffer back; the oldest ones go when the pool outgrows `Config.comm_buffer_bytes`."""
        if buffer is None:
            return
        self._free.append(buffer)
        while self.bytes_kept > Config.comm_buffer_bytes:
            self._free.pop(0)

    def clear(self) -> None:
        self._free.clear()


def _map(size: int) -> Tensor:
    """Fresh memory, (size,) uint8, that goes back to the system with the tensor."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
