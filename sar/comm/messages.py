"""Point-to-point messages between all pairs of workers, inside a call that they have agreed on."""

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor

from sar.comm.group import Group
from sar.comm.statistics import counters
from sar.config import Config

HEAD_BYTES = 2**17
"""What is received of a message before its length is known."""


def exchange_buffers(
    group: Group, call: str, buffers: Sequence[Tensor], into: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Send `buffers[q]` to every worker q; return what every worker sent to this one.

    Several such exchanges make up one call, on which the workers have to agree before the first.

    Args:
        group: any group; inside its `guard()`.
        call: what this is for, for errors.
        buffers: one tensor per worker. Without `into` bytes in CPU memory, which begin with their number, int64.
        into: where to put what each worker sends, where this worker knows its size.

    Returns:
        One tensor per worker. The own one is returned as it is.
    """
    received = list(buffers if into is None else into)
    received[group.rank] = buffers[group.rank]
    if group.exchanging is not None:
        arrived = group.exchanging(call, buffers)
        if into is None:
            return [*arrived[: group.rank], buffers[group.rank], *arrived[group.rank + 1 :]]
        for source, message in enumerate(arrived):
            if source != group.rank:
                received[source].view(-1).view(torch.uint8).copy_(message)
        return received
    for k in range(1, group.world_size):
        source, reader = (group.rank - k) % group.world_size, (group.rank + k) % group.world_size
        if into is not None:
            _swap(group, source, received[source], reader, buffers[reader], call)
        else:
            received[source] = _swap_unknown(group, source, reader, buffers[reader], call)
    return received


def _swap_unknown(group: Group, source: int, reader: int, sent: Tensor, call: str) -> Tensor:
    """As `_swap`, of bytes that begin with their length; returns what came.

    gloo takes a message that is shorter than what was posted for it, and leaves the rest as it was. So short ones need
    no second message.
    """
    head = torch.empty(HEAD_BYTES, dtype=torch.uint8, device="cpu")
    _swap(group, source, head, reader, sent[:HEAD_BYTES], call)
    length = int(head[:8].view(torch.int64))
    counters.bytes_received -= max(HEAD_BYTES - length, 0)
    received = head[:length]
    if length > HEAD_BYTES:
        received = torch.empty(length, dtype=torch.uint8, device="cpu")
        received[:HEAD_BYTES] = head
    _swap(group, source, received[HEAD_BYTES:], reader, sent[HEAD_BYTES:], call)
    return received


def _swap(group: Group, source: int, received: Tensor, reader: int, sent: Tensor, call: str) -> None:
    """Receive from one worker while sending to another; both may be empty."""
    limit = timedelta(seconds=Config.timeout)
    works = []
    outgoing = sent.to("cpu").contiguous()
    incoming = received if received.device.type == "cpu" else torch.empty_like(received, device="cpu")
    if incoming.nbytes:
        works.append((source, group.wait_for(lambda: group.gloo.recv([incoming], source, 0), call, source)))
    if outgoing.nbytes:
        works.append((reader, group.wait_for(lambda: group.gloo.send([outgoing], reader, 0), call, reader)))
    for peer, work in works:
        group.wait_for(lambda work=work: work.wait(limit), call, peer)  # type: ignore[misc]
    if incoming is not received:
        received.copy_(incoming)
    counters.bytes_received += incoming.nbytes
    counters.bytes_sent += outgoing.nbytes
    counters.messages_sent += 1 if outgoing.nbytes else 0
