"""The interface of transports, which carry bytes between workers for `Group`.

A transport lasts as long as its group, and its connections for one generation ([Note: recovery] in `group.py`). `Group`
agrees, guards and counts; nothing above it asks which transport is in use. Every wait ends after `Config.timeout` at
the latest. `process_transport.py` has the transport between processes, by gloo and NCCL, and `outofcore/transport.py`
that between workers of one process.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from sar.errors import CommunicationError

HEAD_BYTES: Final = 2**17
"""Bytes of a message that are received before its length is known."""
LEFT_EARLY: Final = (
    "Has a worker left its loop earlier, or is a call inside `if sar.rank() == 0:`? A decision must be taken by all "
    "workers alike: sar.EarlyStopping, sar.all_sum."
)


Wait = Callable[[], object]
"""Waits for a posted message: until it has arrived, or until the sent tensor may be changed."""


class Message(NamedTuple):
    """A contiguous tensor to or from one worker. It must stay alive until the message has been waited for."""

    peer: int
    data: Tensor


class Failure(NamedTuple):
    """The reason why a generation of the group has ended."""

    here: str  # for later calls of this worker
    for_others: str  # for the other workers; it names this one
    final: bool  # whether the group cannot recover


@dataclass(eq=False)
class SharedTensor:
    """A tensor of one worker that others of the same process read in place, in memory or in a file."""

    rows: Tensor

    def will_need(self, rows: Tensor | None = None) -> None:
        """Prefetch these rows, ascending, or all of them if None. Does nothing for tensors in memory."""


class Shared(NamedTuple):
    """Tensors of one worker that others of its process read, and tensors that they add to."""

    read: Sequence[SharedTensor]
    added_to: Sequence[SharedTensor]


class Spilled(NamedTuple):
    """Counters of a worker's spill file, in bytes. Features and graph structure, which stay mapped, are not counted."""

    left: int  # bytes of tensors that left memory when its turn last passed
    written: int
    read: int


class Transport:
    """One worker's connections to all others, over which payloads travel from and to `device`.

    This class itself carries nothing: every operation completes at once, as if all workers did the same as this one.
    This suffices for a single worker, and for plans.

    All operations but `post` block. They raise RuntimeError, which `explain` turns into an error for the user, or
    CommunicationError. Each rank of a transport may stand for a process with several workers, `each` of them.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device or torch.device("cpu")
        self.each = 1
        # Ranks of the workers in this process, including this one. They `swap` tensors without copies.
        self.local_peers = range(rank, rank + 1)
        self.awaited: int | None = None  # the worker on which an operation among all of them depends now

    @property
    def final(self) -> bool:
        """Whether the transport can never connect again."""
        return False

    def name(self, rank: int | None) -> str:
        """Name of a worker, for errors; None if it is not known which."""
        if rank is None:
            return "another worker"
        if self.each == 1:
            return f"worker {rank}"
        return f"process {rank} (workers {rank * self.each} to {(rank + 1) * self.each - 1})"

    def clock(self) -> float:
        """Time in seconds that counts for this worker, from an arbitrary start."""
        return time.perf_counter()

    def spilled(self) -> Spilled | None:
        """Counters of the spill file; None if tensors stay in memory."""
        return None

    # -- connections

    def connect(self, group: Any, limit: float) -> None:
        """Make the connections of a `Group`'s generation, together with all other workers, within `limit` seconds."""

    def abort(self, generation: int, failure: Failure) -> None:
        """End all workers' waits for this one in a generation, and tell them the reason. Any thread may call this."""

    def close(self) -> None:
        """Close the transport for good. Does nothing if the connections outlive the group."""

    def explain(self, error: RuntimeError, call: str, peer: int | None) -> CommunicationError | None:
        """The error to raise for a failed wait for `peer`, None for all; None if no wait has failed."""
        return None

    # -- operations

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather one small tensor of equal shape from every worker, by rank, in CPU memory or on `device`.

        Callers must not change the results in place.
        """
        return [tensor.clone() for _ in range(self.world_size)]

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        """Combine a contiguous tensor over all workers, in place; op is a `torch.distributed.ReduceOp`."""

    def broadcast(self, tensor: Tensor) -> None:
        """Copy the contiguous tensor of worker 0 to all workers, in place."""

    def post(self, inbound: Message | None, outbound: Message | None, tag: int) -> tuple[Wait | None, Wait | None]:
        """Begin to receive one message and to send one; return the wait for each, None if there is nothing to wait for.

        The messages of two workers are matched by `tag`, or by the order of posting, which is the same at both ends. A
        message between CPUs may be shorter than the receiving tensor, whose end then does not change.
        """
        return None, None

    def all_to_all(self, buffers: Sequence[Tensor], into: Sequence[Tensor] | None) -> list[Tensor]:
        """See `Group.exchange`. All messages are posted at once, the k-th from (rank - k) and to (rank + k) mod W."""
        if into is not None:
            received = [*into]
            received[self.rank] = buffers[self.rank]
            self._swap(self.device, buffers, received)
            return received
        # The first 8 bytes are the length. A short buffer takes one message, as `post` allows messages shorter than
        # the tensor that receives them.
        received, cpu = [*buffers], torch.device("cpu")
        heads = [torch.empty(HEAD_BYTES, dtype=torch.uint8, device=cpu) for _ in buffers]
        self._swap(cpu, [buffer[:HEAD_BYTES] for buffer in buffers], heads)
        for source, head in enumerate(heads):
            if source != self.rank:
                length = int(head[:8].view(torch.int64))
                received[source] = head[:length]
                if length > HEAD_BYTES:
                    received[source] = torch.cat([head, head.new_empty(length - HEAD_BYTES)])
        self._swap(cpu, *([buffer[HEAD_BYTES:] for buffer in both] for both in (buffers, received)))
        return received

    def _swap(self, device: torch.device, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Send `sent[q]` to each other worker q, and receive `received[p]` from each p, through memory of `device`."""
        posted = []
        for k in range(1, self.world_size):
            source, reader = (self.rank - k) % self.world_size, (self.rank + k) % self.world_size
            outgoing, target = sent[reader].to(device).contiguous(), received[source]
            incoming = target if target.device.type == device.type else torch.empty_like(target, device=device)
            inbound = Message(source, incoming) if incoming.nbytes else None
            outbound = Message(reader, outgoing) if outgoing.nbytes else None
            self.awaited = source
            waits = self.post(inbound, outbound, 0) if inbound or outbound else (None, None)
            posted.append((waits, source, incoming, reader, outgoing))
        for waits, source, incoming, reader, _ in posted:
            for wait, self.awaited in zip(waits, (source, reader), strict=True):
                if wait is not None:
                    wait()
            if incoming is not received[source]:
                received[source].copy_(incoming)
        self.awaited = None

    # -- workers of the same process

    def swap(self, brought: Any, *, in_order: bool) -> list[Any]:
        """Gather the contributions of this process's workers, by rank. With `in_order`, they continue in this order."""
        return [brought]

    def shared(self, read: Sequence[Tensor], added_to: Sequence[Tensor]) -> Shared:
        """Tensors to `swap`: constant tensors that the workers of this process read, and tensors that they add to."""
        return Shared(list(map(SharedTensor, read)), list(map(SharedTensor, added_to)))

    def rows_of_process(self, spec: Any) -> Any:
        """The rows of an exchange (`OwnRows`, of an `ExchangeSpec`) on a worker that shares its process with others."""
        raise NotImplementedError
