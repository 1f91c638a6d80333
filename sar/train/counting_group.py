"""A group of workers of whom only one is there: what it sends is counted, and goes nowhere."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sar.comm.group import Group
from sar.comm.statistics import statistics
from sar.comm.transport import Message, Transport


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

    Only its transport is another one, so that everything is counted where a real worker counts it.

    calls_made: every distributed call, in order.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(dist.HashStore(), rank, world_size, torch.device("cpu"))
        self.calls_made: list[CallTraffic] = []
        self._counted = statistics().bytes_sent

    @property
    def transport(self) -> Transport:
        """What stands for the connections to the others."""
        return _NoWire(self.world_size)

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


class _NoWire(Transport):
    """Carries nothing; every operation is done at once."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.clone() for _ in range(self._world_size)]

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        pass

    def broadcast(self, tensor: Tensor) -> None:
        pass

    def post(self, inbound: Message | None, outbound: Message | None, tag: int) -> tuple[Any, Any]:
        return inbound, outbound

    def wait(self, work: Any) -> None:
        pass

    def abort(self) -> None:
        pass

    def failure(self, error: RuntimeError) -> None:
        return None
