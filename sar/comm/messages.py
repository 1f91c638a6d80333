"""Messages between all pairs of workers, in rounds: in round k from (rank - k) mod W and to (rank + k) mod W."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sar.comm.statistics import counters
from sar.comm.transport import Message
from sar.raw_memory import resolved

HEAD_BYTES = 2**17
"""What is received of a message before its length is known."""


class Wire(Protocol):
    """What is needed of a group; see `Group`."""

    rank: int
    world_size: int

    def post(self, inbound: Message | None, outbound: Message | None, tag: int, call: str) -> tuple[Any, Any]: ...

    def wait(self, work: Any, peer: int, call: str) -> None: ...


def exchange_in_rounds(wire: Wire, call: str, buffers: Sequence[Tensor], into: Sequence[Tensor] | None) -> list[Tensor]:
    """As `Group.exchange`."""
    buffers = list(map(resolved, buffers))
    received = list(buffers if into is None else into)
    received[wire.rank] = buffers[wire.rank]
    for k in range(1, wire.world_size):
        source, reader = (wire.rank - k) % wire.world_size, (wire.rank + k) % wire.world_size
        if into is not None:
            _swap(wire, source, received[source], reader, buffers[reader], call)
        else:
            received[source] = _swap_unknown(wire, source, reader, buffers[reader], call)
    return received


def _swap_unknown(wire: Wire, source: int, reader: int, sent: Tensor, call: str) -> Tensor:
    """As `_swap`, of bytes that begin with their length; returns what came.

    A message may be shorter than the tensor posted for it, so short ones need no second message.
    """
    head = torch.empty(HEAD_BYTES, dtype=torch.uint8, device="cpu")
    _swap(wire, source, head, reader, sent[:HEAD_BYTES], call)
    length = int(head[:8].view(torch.int64))
    counters.bytes_received -= max(HEAD_BYTES - length, 0)
    received = head[:length]
    if length > HEAD_BYTES:
        received = torch.empty(length, dtype=torch.uint8, device="cpu")
        received[:HEAD_BYTES] = head
    _swap(wire, source, received[HEAD_BYTES:], reader, sent[HEAD_BYTES:], call)
    return received


def _swap(wire: Wire, source: int, received: Tensor, reader: int, sent: Tensor, call: str) -> None:
    """Receive from one worker while sending to another, through CPU memory; both may be empty."""
    outgoing = sent.to("cpu").contiguous()
    incoming = received if received.device.type == "cpu" else torch.empty_like(received, device="cpu")
    inbound = Message(source, incoming) if incoming.nbytes else None
    outbound = Message(reader, outgoing) if outgoing.nbytes else None
    for work, peer in zip(wire.post(inbound, outbound, 0, call), (source, reader), strict=True):
        if work is not None:
            wire.wait(work, peer, call)
    if incoming is not received:
        received.copy_(incoming)
