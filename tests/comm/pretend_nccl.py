"""In the place of `ProcessGroupNCCL`, for tensors of the pretend device: bytes travel over gloo, in NCCL's order.

What is stricter than gloo is so here, too: messages of two workers meet by order, the first operation is one of all
workers, messages are posted in batches, and data are there after the wait and not before. Until then a buffer that is
received into is poisoned, and one that is used before its wait, or changed before what it sends has gone, is an error.
"""

from collections import Counter
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tests.pretend_gpu import PretendTensor

POISON = 0xFF
REDUCED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8} | {
    *(torch.uint8, torch.bool, torch.complex64)  # torch hands these on as uint8, and as pairs of float32
}


class _Sent(NamedTuple):
    buffer: Tensor  # (bytes,) on the device
    copy: Tensor  # of what it had when it was posted
    work: Any


class PretendNccl:
    """One worker's end; arguments as of `new_nccl`."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._gloo = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=60))
        self._met = False
        self._batch: _Batch | None = None
        self._posted: Counter[tuple[str, int]] = Counter()

    def allreduce(self, tensors: list[Tensor], options: Any) -> "_Batch":
        assert tensors[0].dtype in REDUCED
        self._met = True
        self._gloo.allreduce([_values(tensors[0])], options).wait()
        return _Batch()

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> "_Batch":
        self._gloo.allgather([list(map(_values, outputs[0]))], [_values(inputs[0])], options).wait()
        return _Batch()

    def broadcast(self, tensors: list[Tensor], options: Any) -> "_Batch":
        self._gloo.broadcast([_values(tensors[0])], options).wait()
        return _Batch()

    def _start_coalescing(self) -> None:
        assert self._met, "the first operation is not one of all workers"
        assert self._batch is None
        self._batch = _Batch()

    def _end_coalescing(self) -> "_Batch":
        assert self._batch is not None
        done, self._batch = self._batch, None
        return done

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        buffer = _values(tensors[0]).fill_(POISON)
        copy = torch.empty_like(buffer)
        assert self._batch is not None
        self._batch.received.append(_Sent(buffer, copy, self._gloo.recv([copy], peer, self._number("from", peer))))

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        buffer = _values(tensors[0])
        copy = buffer.clone()
        assert self._batch is not None
        self._batch.sent.append(_Sent(buffer, copy, self._gloo.send([copy], peer, self._number("to", peer))))

    def abort(self) -> None:
        """Nothing waits on a device."""

    def _number(self, where: str, peer: int) -> int:
        """In the place of a tag, by which gloo's messages meet."""
        self._posted[where, peer] += 1
        return self._posted[where, peer]


class _Batch:
    """Work in the stream of NCCL."""

    def __init__(self) -> None:
        self.received: list[_Sent] = []
        self.sent: list[_Sent] = []

    def wait(self, timeout: timedelta | None = None) -> None:
        """Let what is queued for the device from now on come after this."""
        for buffer, copy, work in self.received:
            work.wait()
            assert bool((buffer == POISON).all()), "a buffer has been written to before the wait for what arrives in it"
            buffer.copy_(copy)
        for buffer, copy, work in self.sent:
            work.wait()
            assert torch.equal(buffer, copy), "a buffer has changed before what it sends had gone"
        self.received, self.sent = [], []


def _values(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, PretendTensor), "NCCL takes tensors on the device"
    assert tensor.is_contiguous()
    return tensor.values_on_cpu
