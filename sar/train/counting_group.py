"""A group of workers of whom only one is there: what it sends is counted, and goes nowhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sar.comm.group import Group
from sar.comm.statistics import statistics


@dataclass
class CallTraffic:
    """Bytes that a worker sends in one distributed call.

    call: what it does, as the workers agree on it.
    messages: bytes after the agreement.
    """

    call: str
    messages: int = 0


class CountingGroup(Group):
    """A group in which everybody agrees with this worker and sends what it sends.

    It takes the place of gloo only, so that everything is counted where a real worker counts it.

    calls_made: every distributed call, in order.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(dist.HashStore(), rank, world_size, torch.device("cpu"))
        self.calls_made: list[CallTraffic] = []
        self._counted = statistics().bytes_sent

    @property
    def gloo(self) -> Any:
        """What stands for the connections to the others."""
        return _NoWire()

    def agree(self, call: str, flags: int = 0) -> list[int]:
        """This worker's flags, for each of the workers."""
        self.count_messages()
        everybodys = super().agree(call, flags)
        self._newly_sent()  # which is no message
        self.calls_made.append(CallTraffic(call))
        return everybodys

    def count_messages(self) -> None:
        """Add what was sent since the last agreement to its call."""
        sent = self._newly_sent()
        if self.calls_made:
            self.calls_made[-1].messages += sent

    def _newly_sent(self) -> int:
        before, self._counted = self._counted, statistics().bytes_sent
        return self._counted - before


class _NoWire:
    """As much of gloo as distributed calls use; every operation is done at once."""

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> "_NoWire":
        return self

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> "_NoWire":
        return self

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> "_NoWire":
        return self

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> "_NoWire":
        return self

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: Any) -> "_NoWire":
        for gathered, own in zip(outputs, inputs, strict=True):
            for theirs in gathered:
                theirs.copy_(own)
        return self

    def wait(self, limit: Any = None) -> bool:
        return True
