"""Objects between a trainer and its background processes, with their tensors in anonymous memory files.

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
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, BinaryIO

import torch
from torch import Tensor

from sar.raw_memory import resolved
from sar.sampling import reused_memory

ALIGNMENT = 64
"""Tensors begin at multiples of so many bytes."""


class _Writer(pickle.Pickler):
    """Writes tensors to a file, and pickles the rest with their places there."""

    def __init__(self, stream: io.BytesIO, file: BinaryIO) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._file = file

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        begin = self._file.seek(-self._file.tell() % ALIGNMENT, os.SEEK_CUR)
        self._file.write(_bytes_of(value.contiguous()))
        return begin, value.dtype, tuple(value.shape)


class _CopyingReader(pickle.Unpickler):
    """Copies tensors out of the file."""

    def __init__(self, stream: io.BytesIO, file: BinaryIO) -> None:
        super().__init__(stream)
        self._file = file

    def persistent_load(self, place: Any) -> Tensor:
        begin, dtype, shape = place
        tensor = reused_memory.empty(shape, dtype)
        self._file.seek(begin)
        self._file.readinto(_bytes_of(tensor))  # type: ignore[attr-defined]
        return tensor


class _MappingReader(pickle.Unpickler):
    """Makes tensors views of the file."""

    def __init__(self, stream: io.BytesIO, file: BinaryIO) -> None:
        super().__init__(stream)
        number = file.fileno()
        size = os.fstat(number).st_size
        self._contents = torch.from_file(f"/proc/self/fd/{number}", size=size, dtype=torch.uint8)

    def persistent_load(self, place: Any) -> Tensor:
        begin, dtype, shape = place
        size = dtype.itemsize * torch.Size(shape).numel()
        if not size:  # nothing was written, so the file may end before
            return torch.empty(shape, dtype=dtype)
        return self._contents[begin : begin + size].view(dtype).view(shape)


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

    Args:
        channel: to receive from.
        mapped: leave its tensors in the memory that all receivers share, instead of copying them.
    """
    stream = io.BytesIO(channel.recv_bytes())
    reader = _MappingReader if mapped else _CopyingReader
    with open(reduction.recv_handle(channel), "rb") as file:
        return reader(stream, file).load()


def _bytes_of(tensor: Tensor) -> Any:
    """The memory of a contiguous tensor, as a buffer."""
    # A contiguous tensor of one element may have any stride, which a view as bytes refuses.
    return resolved(tensor.detach()).as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
