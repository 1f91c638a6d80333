"""What carries bytes between workers: the interface that `Group` speaks to.

A transport lasts as long as its group, and its connections for one generation ([Note: recovery] in `group.py`). `Group`
agrees, guards and counts; nothing above it asks which transport there is. Every wait ends after `Config.timeout` at the
latest. Between processes: `process_transport.py`.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from sar.comm.statistics import counters
from sar.errors import CommunicationError
from sar.tensor_views import materialize

T = TypeVar("T")

HEAD_BYTES: Final = 2**17
"""What is received of a message before its length is known."""
LEFT_EARLY: Final = (
    "Has a worker left its loop earlier? A decision must be taken by all workers alike: sar.EarlyStopping, sar.all_sum."
)


class Message(NamedTuple):
    """To or from one worker: a contiguous tensor, which must live until the message is waited for."""

    peer: int
    data: Tensor


class Wait(NamedTuple):
    """What a worker waits for."""

    call: str
    who: str  # the worker or workers that it depends on, in words
    began: float  # by this process's monotonic clock

    def __str__(self) -> str:
        return f"waiting for {self.who} for {time.monotonic() - self.began:.0f} s in: {self.call}"


class Member(Protocol):
    """What a transport needs of its group; see `Group`."""

    generation: int
    calls: int
    final: bool

    @property
    def waiting(self) -> Wait | None: ...
    @property
    def whereabouts(self) -> str: ...
    def check(self) -> None: ...
    def abort(self, error: BaseException, *, final: bool = False) -> None: ...
    def stop(self, generation: int, reason: str, *, final: bool) -> None: ...
    def post(self, inbound: Message | None, outbound: Message | None, tag: int, call: str) -> tuple[Any, Any]: ...
    def wait(self, work: Any, peer: int, call: str) -> None: ...
    def wait_for(self, operation: Callable[[], T], call: str, peer: int | None = None) -> T: ...


class SharedTensor:
    """A tensor of one worker that others of the same process read where it lies, in memory or in a file."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def will_need(self, rows: Tensor | None = None) -> None:
        """Have the system read these rows, ascending, while this process does something else; None for all."""

    def read(self, rows: Tensor, place: Tensor | None = None) -> Tensor:
        """The rows that `will_need` has been given first since; in `place`, on the CPU, where that is given."""
        return torch.index_select(self.rows, 0, rows.to(self.rows.device), out=place)


class Spilled(NamedTuple):
    """What a worker whose memory is left to a file has there, in bytes; what is mapped from the first is not read."""

    left: int  # of its tensors that were out of memory when its turn had passed
    written: int
    read: int


class Shared(NamedTuple):
    """What a worker lets others of its process read, and add to."""

    read: Sequence[SharedTensor]
    added_to: Sequence[SharedTensor]


class Transport(ABC):
    """One worker's connections to all others, over which payloads travel from and to `device`.

    Operations block, but for `post`. They raise RuntimeError, of which `explain` knows more, or CommunicationError.
    What seems one worker here may be a process of so many: `each`.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.each = 1

    @property
    def local_peers(self) -> range:
        """The workers of the same process, this one among them, whose tensors are read where they lie: see `share`."""
        return range(self.rank, self.rank + 1)

    @property
    def final(self) -> bool:
        """Whether no connections can be made any more."""
        return False

    def name(self, rank: int) -> str:
        """A worker in words."""
        if self.each == 1:
            return f"worker {rank}"
        return f"process {rank} (workers {rank * self.each} to {(rank + 1) * self.each - 1})"

    def clock(self) -> float:
        """Seconds from some moment on, as far as they are this worker's."""
        return time.perf_counter()

    def spilled(self) -> Spilled | None:
        """What has left memory so far; None where nothing is to."""
        return None

    # -- connections

    @abstractmethod
    def connect(self, group: Member, limit: float) -> None:
        """Make the connections of the group's generation, together with all other workers, within `limit` seconds."""

    @abstractmethod
    def abort(self, generation: int, own: str, told: str, *, final: bool) -> None:
        """End the waits of all workers for this one in a generation, from any thread, and leave word why.

        The reason is `own` for the workers of this process, and `told` for others; `final` where none can recover.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave for good."""

    @abstractmethod
    def explain(
        self, error: RuntimeError, group: Member, call: str, who: str
    ) -> tuple[CommunicationError, bool] | None:
        """The error that a failed wait for `who` means, and whether it is final; None for one of another kind."""

    @abstractmethod
    def whereabouts(self, group: Member, call: str) -> str:
        """Which call each worker is in, a line for each; called by all of them."""

    # -- operations

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """One small tensor of equal shape from every worker, by rank, in CPU memory or on `device` as given.

        Nobody changes what is returned.
        """

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        """Combine a contiguous tensor over all workers, in place; op is a `torch.distributed.ReduceOp`."""

    @abstractmethod
    def broadcast(self, tensor: Tensor) -> None:
        """Give all workers the contiguous tensor of worker 0, in place."""

    @abstractmethod
    def post(self, inbound: Message | None, outbound: Message | None, tag: int) -> tuple[Any, Any]:
        """Begin to receive one message and to send one; what `wait` takes for each, None where there is none.

        Messages of two workers meet by `tag`, or by the order in which they are posted, which both ends keep. One
        between CPUs may be shorter than the tensor for it, whose end then stays as it was.
        """

    @abstractmethod
    def wait(self, work: Any, peer: int) -> None:
        """Wait for a message that was posted: until it is there, or what it was sent from may be used again."""

    def all_to_all(
        self, group: Member, call: str, buffers: Sequence[Tensor], into: Sequence[Tensor] | None
    ) -> list[Tensor]:
        """As `Group.exchange`: all messages are posted at once, the k-th from (rank - k) and to (rank + k) mod W."""
        buffers = list(map(materialize, buffers))
        if into is not None:
            return self.start_all_to_all(group, call, buffers, into)()
        received = buffers.copy()
        # Bytes begin with their length. Short ones take one message, as `post` allows.
        heads = [torch.empty(HEAD_BYTES, dtype=torch.uint8, device="cpu") for _ in buffers]
        self._swap(group, heads[0].device, heads, [one[:HEAD_BYTES] for one in buffers], call)()
        for source, head in enumerate(heads):
            if source != self.rank:
                length = int(head[:8].view(torch.int64))
                counters.bytes_received -= max(HEAD_BYTES - length, 0)
                received[source] = head[:length]
                if length > HEAD_BYTES:
                    received[source] = torch.cat([head, head.new_empty(length - HEAD_BYTES)])
        rest, theirs = ([one[HEAD_BYTES:] for one in all_bytes] for all_bytes in (buffers, received))
        self._swap(group, heads[0].device, theirs, rest, call)()
        return received

    def start_all_to_all(
        self, group: Member, call: str, buffers: Sequence[Tensor], into: Sequence[Tensor]
    ) -> Callable[[], list[Tensor]]:
        """As `Group.start_exchange`."""
        received = list(into)
        received[self.rank] = materialize(buffers[self.rank])
        finish = self._swap(group, self.device, received, list(map(materialize, buffers)), call)

        def wait() -> list[Tensor]:
            finish()
            return received

        return wait

    def _swap(
        self, group: Member, device: torch.device, received: Sequence[Tensor], sent: Sequence[Tensor], call: str
    ) -> Callable[[], None]:
        """Begin to send `sent[q]` to each other worker q and to receive `received[p]` from p, through memory of
        `device`; what it returns waits for all of it.
        """
        waits = []
        for k in range(1, self.world_size):
            source, reader = (self.rank - k) % self.world_size, (self.rank + k) % self.world_size
            outgoing, here = sent[reader].to(device).contiguous(), received[source]
            incoming = here if here.device.type == device.type else torch.empty_like(here, device=device)
            inbound = Message(source, incoming) if incoming.nbytes else None
            outbound = Message(reader, outgoing) if outgoing.nbytes else None
            waits.append((group.post(inbound, outbound, 0, call), source, incoming, reader, outgoing))

        def finish() -> None:
            for (receive, send), source, incoming, reader, _ in waits:
                for work, peer in ((receive, source), (send, reader)):
                    if work is not None:
                        group.wait(work, peer, call)
                if incoming is not received[source]:
                    received[source].copy_(incoming)

        return finish

    def share(self, read: Sequence[Tensor], added_to: Sequence[Tensor], *, in_order: bool) -> list[Shared]:
        """Let the workers of this process read some tensors, and add to others, until all meet here again.

        Those to `read` stay as they are. With `in_order` the workers go on in the order of their ranks.
        """
        return [Shared(list(map(SharedTensor, read)), list(map(SharedTensor, added_to)))]
