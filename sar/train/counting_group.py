"""A group of workers of whom only one is there: what it sends is counted, and goes nowhere."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sar.comm.group import Group
from sar.comm.statistics import statistics
from sar.comm.transport import Member, Message, Transport


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
        super().__init__(CountingTransport(rank, world_size, torch.device("cpu")))
        self.calls_made: list[CallTraffic] = []
        self._counted = statistics().bytes_sent

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


class CountingTransport(Transport):
    """Carries nothing; every operation is done at once."""

    def connect(self, group: Member, limit: float) -> None:
        pass

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.clone() for _ in range(self.world_size)]

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        pass

    def broadcast(self, tensor: Tensor) -> None:
        pass

    def post(self, inbound: Message | None, outbound: Message | None, tag: int) -> tuple[Any, Any]:
        return inbound, outbound

    def wait(self, work: Any, peer: int) -> None:
        pass

    def abort(self, generation: int, own: str, told: str, *, final: bool) -> None:
        pass

    def close(self) -> None:
        pass

    def explain(self, error: RuntimeError, group: Member, call: str, who: str) -> None:
        return None

    def whereabouts(self, group: Member, call: str) -> str:
        return f"  worker {self.rank}: {call}"
