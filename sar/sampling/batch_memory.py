"""Memory of batches: blocks that are used again, and files in memory that bring tensors from process to process.

[Note: page faults]
Features of a batch are tens of megabytes. The allocator takes blocks of that size from the system and gives them back,
so that each batch would pay for having all of its pages mapped and cleared, which takes longer than filling them.

[Note: memory files]
The tensors of a message are written to a file in memory (`memfd_create`), whose descriptor travels over the channel;
the rest is pickled. The receiver copies each tensor into memory of its own and closes the file, so a tensor that is
kept holds neither a descriptor nor the rest of its message. What several processes read all their lives is mapped
instead. The file has no name: nothing can be left behind in /dev/shm, and a small /dev/shm does no harm. Nothing of
this ever comes from a disk or a network.
"""

import contextlib
import io
import os
import pickle
import threading
import weakref
from collections.abc import Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sar.tensor_views import as_bytes

LEAST_BYTES = 2**20  # smaller tensors are the allocator's
KEPT = 4  # unused blocks that are kept at most; the smallest go first
SLACK = 1.25  # how much larger than asked for a block is made, since the next batch is another size
ALIGNMENT = 64  # tensors of a message begin at multiples of so many bytes

_free: list[NDArray[np.uint8]] = []
_lock = threading.RLock()  # a finalizer may run inside `empty`


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As `torch.empty`, contiguous and on the CPU, in memory that is used again: see [Note: page faults]."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if nbytes < LEAST_BYTES:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    with _lock:
        fitting = sum(block.nbytes >= nbytes for block in _free)  # the first, as the largest come first
        block = _free.pop(fitting - 1) if fitting else np.empty(int(nbytes * SLACK), dtype=np.uint8)
    lease = block[:nbytes]
    # The tensor's storage holds on to the lease, which therefore ends with the last tensor in it.
    weakref.finalize(lease, _give_back, block).atexit = False
    return torch.from_numpy(lease).view(dtype).view(tuple(shape))


def _give_back(block: NDArray[np.uint8]) -> None:
    with _lock:
        _free.append(block)
        _free.sort(key=len, reverse=True)
        del _free[KEPT:]


class _Writer(pickle.Pickler):
    """Writes tensors to a file, and pickles the rest with their places there."""

    def __init__(self, stream: io.BytesIO, file: BinaryIO) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._file = file

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        begin = self._file.seek(-self._file.tell() % ALIGNMENT, os.SEEK_CUR)
        self._file.write(as_bytes(value))
        return begin, value.dtype, tuple(value.shape)


class _Reader(pickle.Unpickler):
    """Copies tensors out of the file; with `mapped`, makes them views of it."""

    def __init__(self, stream: io.BytesIO, file: BinaryIO, mapped: bool) -> None:
        super().__init__(stream)
        self._file = file
        self._contents: Tensor | None = None
        if mapped:
            number = file.fileno()
            size = os.fstat(number).st_size
            self._contents = torch.from_file(f"/proc/self/fd/{number}", size=size, dtype=torch.uint8)

    def persistent_load(self, place: Any) -> Tensor:
        begin, dtype, shape = place
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if self._contents is not None and nbytes:  # of no bytes nothing was written, so the file may end before
            return self._contents[begin : begin + nbytes].view(dtype).view(shape)
        tensor = empty(shape, dtype)
        self._file.seek(begin)
        self._file.readinto(as_bytes(tensor))  # type: ignore[attr-defined]
        return tensor


def send(message: Any, *channels: "Connection[Any, Any]") -> None:
    """Send an object to one or several processes.

    A receiver that is gone is passed over: its end is noticed when the sender waits for it.
    """
    stream = io.BytesIO()
    with open(os.memfd_create("sar-sampling", os.MFD_CLOEXEC), "wb") as file:
        _Writer(stream, file).dump(message)
        file.flush()
        for channel in channels:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                channel.send_bytes(stream.getvalue())
                reduction.send_handle(channel, file.fileno(), 0)


def receive(channel: "Connection[Any, Any]", *, mapped: bool = False) -> Any:
    """The next object; raises EOFError or OSError where the other process is gone.

    With `mapped` its tensors stay in the memory that all receivers share, instead of being copied.
    """
    stream = io.BytesIO(channel.recv_bytes())
    with open(reduction.recv_handle(channel), "rb") as file:
        return _Reader(stream, file, mapped).load()
