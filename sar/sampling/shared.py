"""Messages between the processes of one worker: objects whose tensors lie in anonymous shared memory.

[Note: memory files]
The tensors of a message are copied, once, into a memory file (`memfd_create`). Its descriptor travels over the channel,
and the receivers' tensors are views of it. It has no name, so nothing can be left behind in /dev/shm: the memory is
free when the last process that has mapped it ends or lets go of it. The rest of a message is pickled, as
`multiprocessing` does it; nothing of this ever comes from a file or a network.
"""

import contextlib
import io
import mmap
import os
import pickle
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes


class _Writer(pickle.Pickler):
    """Pickles all but the tensors, which it lists."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self.size = 0

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        begin, self.size = self.size, self.size + -(-value.nbytes // ALIGNMENT) * ALIGNMENT
        self.tensors.append(value)
        return begin, value.dtype, tuple(value.shape)


class _Reader(pickle.Unpickler):
    """Puts views of a buffer where the tensors were."""

    def __init__(self, stream: io.BytesIO, buffer: Tensor) -> None:
        super().__init__(stream)
        self._buffer = buffer

    def persistent_load(self, found: Any) -> Tensor:
        begin, dtype, shape = found
        return _view(self._buffer, begin, dtype, shape)


def send(message: Any, *channels: "Connection[Any, Any]") -> None:
    """Send an object to one or several processes, with its tensors in memory that they share.

    A receiver that is gone is passed over: its end is noticed when it is heard.
    """
    stream = io.BytesIO()
    writer = _Writer(stream)
    writer.dump(message)
    file = os.memfd_create("sar-sampling", os.MFD_CLOEXEC)
    try:
        if writer.tensors:
            os.ftruncate(file, max(writer.size, 1))
            buffer, begin = _map(file), 0
            for tensor in writer.tensors:
                _view(buffer, begin, tensor.dtype, tuple(tensor.shape)).copy_(tensor)
                begin += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        for channel in channels:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                channel.send_bytes(stream.getvalue())
                reduction.send_handle(channel, file, 0)
    finally:
        os.close(file)


def receive(channel: "Connection[Any, Any]") -> Any:
    """The next object; raises EOFError or OSError where the other process is gone."""
    data = channel.recv_bytes()
    file = reduction.recv_handle(channel)
    try:
        buffer = _map(file) if os.fstat(file).st_size else torch.empty(0, dtype=torch.uint8)
    finally:
        os.close(file)
    return _Reader(io.BytesIO(data), buffer).load()


def _map(file: int) -> Tensor:
    # All pages at once, instead of a fault for each.
    return torch.frombuffer(mmap.mmap(file, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), dtype=torch.uint8)


def _view(buffer: Tensor, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    size = dtype.itemsize * torch.Size(shape).numel()
    return buffer[begin : begin + size].view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
