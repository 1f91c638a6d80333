"""A transport between threads of one process: it delivers in a random order, and says where all wait for ever."""

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from sar.comm.process_transport import ProcessTransport
from sar.comm.transport import Message, Wait


@dataclass(eq=False)
class End:
    """One end of a message."""

    worker: int
    peer: int
    data: Tensor
    batch: "Batch"
    done: bool = False


@dataclass(eq=False)
class Batch:
    """What a worker has posted together."""

    tag: int
    inbound: End | None = None
    outbound: End | None = None

    @property
    def done(self) -> bool:
        return all(end is None or end.done for end in (self.inbound, self.outbound))


@dataclass
class Network:
    """The messages on their way between `workers` threads.

    in_order: messages of two workers meet by order instead of by tag, and what a worker posts begins when what it
        posted before is done, both ways, as NCCL has it.
    """

    workers: int
    seed: int
    in_order: bool
    moved: threading.Condition = field(default_factory=threading.Condition)
    batches: dict[int, deque[Batch]] = field(default_factory=lambda: defaultdict(deque))
    sends: dict[Any, deque[End]] = field(default_factory=lambda: defaultdict(deque))
    receives: dict[Any, deque[End]] = field(default_factory=lambda: defaultdict(deque))
    ready: list[tuple[End, End]] = field(default_factory=list)
    closed: set[int] = field(default_factory=set)
    awaited: dict[int, End] = field(default_factory=dict)  # by worker
    left: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.connected = threading.Barrier(self.workers)

    def post(self, batch: Batch) -> None:
        """Take in what the ends' worker has posted."""
        with self.moved:
            mine = self.batches[(batch.inbound or batch.outbound).worker]
            mine.append(batch)
            if not self.in_order or len(mine) == 1:
                self._begin(batch)

    def _begin(self, batch: Batch) -> None:
        tag = None if self.in_order else batch.tag
        addresses = []
        if batch.inbound is not None:
            addresses.append((batch.inbound.peer, batch.inbound.worker, tag))
            self.receives[addresses[-1]].append(batch.inbound)
        if batch.outbound is not None:
            addresses.append((batch.outbound.worker, batch.outbound.peer, tag))
            self.sends[addresses[-1]].append(batch.outbound)
        for address in addresses:
            if self.sends[address] and self.receives[address]:
                self.ready.append((self.sends[address].popleft(), self.receives[address].popleft()))

    def _deliver(self) -> None:
        sent, received = self.ready.pop(self.random.randrange(len(self.ready)))
        assert sent.data.nbytes == received.data.nbytes, "a message met another one's receive"
        received.data.copy_(sent.data)
        sent.done = received.done = True
        for end in (sent, received) if self.in_order else ():
            mine = self.batches[end.worker]
            while mine and mine[0].done:
                mine.popleft()
                if mine:
                    self._begin(mine[0])
        self.moved.notify_all()

    def wait(self, end: End) -> None:
        """Deliver messages, any that can be, until this one is there."""
        with self.moved:
            while not end.done:
                if end.peer in self.closed or end.worker in self.closed:
                    raise RuntimeError("[/gloo/transport] closed")  # in the words of gloo
                if self.ready:
                    self._deliver()
                    continue
                self.awaited[end.worker] = end
                if sum(not one.done for one in self.awaited.values()) + self.left == self.workers:
                    self.closed.update(range(self.workers))
                    self.moved.notify_all()
                    raise AssertionError("All workers wait for ever.")
                assert self.moved.wait(60), "a worker neither posts nor waits"
            self.awaited.pop(end.worker, None)

    def leave(self) -> None:
        """A worker is done."""
        with self.moved:
            self.left += 1
            self.moved.notify_all()

    def close(self, worker: int) -> None:
        """Break a worker's connections."""
        with self.moved:
            self.closed.add(worker)
            self.moved.notify_all()


class SimulatedTransport(ProcessTransport):
    """One worker's end of a network in each generation; the workers share a store."""

    def __init__(
        self, networks: Sequence[Network], store: dist.Store, rank: int, jitter: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(store, rank, networks[0].workers)
        self.networks = networks
        self.network = networks[0]
        self.jitter = jitter

    def _connect(self) -> None:
        self.network = self.networks[self._generation]
        self.network.connected.wait(30)  # as gloo, which connects each worker with all others

    def post(self, inbound: Message | None, outbound: Message | None, tag: int) -> tuple[Wait | None, Wait | None]:
        self.jitter()
        batch = Batch(tag)
        if inbound is not None:
            batch.inbound = End(self.rank, *inbound, batch)
        if outbound is not None:
            batch.outbound = End(self.rank, *outbound, batch)
        self.network.post(batch)
        ends = batch.inbound, batch.outbound
        received, sent = (None if end is None else partial(self.network.wait, end) for end in ends)
        return received, sent

    def _close(self) -> None:
        self.network.close(self.rank)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        gathered = [tensor.clone() for _ in range(self.world_size)]
        for k in range(1, self.world_size):
            source, reader = (self.rank - k) % self.world_size, (self.rank + k) % self.world_size
            for wait in self.post(Message(source, gathered[source]), Message(reader, tensor), k):
                assert wait is not None
                wait()
        return gathered
