"""What carries bytes between workers: the interface that the engine speaks to, with gloo and NCCL behind it.

A transport is the connections of one generation ([Note: recovery] in `group.py`), made by all workers together. `Group`
agrees, guards, counts and explains failures; nothing else asks which transport there is. Every wait ends after
`Config.timeout` at the latest.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

from sar.config import Config
from sar.logging_setup import logger

CONNECT_TIMEOUT: Final = 40.0
"""Seconds that connecting may take once all workers are about to."""
CLOSING_TAG: Final = 2**31 - 1
LOST: Final = re.compile(r"\[[^ \]]*gloo/transport[^\]]*\] (.*?)(\. |\n|$)")
"""How gloo reports a connection that broke; any other error is this worker's own."""
OVERDUE: Final = ("Timed out waiting", "timeout caused pair closure")
"""How gloo reports its own time-out; "timed out" alone may be the system's word for a connection that broke."""


class Message(NamedTuple):
    """To or from one worker: a contiguous tensor, which must live until the message is waited for."""

    peer: int
    data: Tensor


class Failure(NamedTuple):
    """What an error of a transport means: a wait took too long (`overdue`), or a connection broke, and how."""

    overdue: bool
    reason: str


class Transport(ABC):
    """One worker's connections to all others. Operations block, but for `post`; all but `abort` raise RuntimeError."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """One small CPU tensor of equal shape from every worker, by rank."""

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

    def wait(self, work: Any) -> None:
        """Wait for a message that was posted: until it is there, or what it was sent from may be used again."""
        work.wait(timedelta(seconds=Config.timeout))

    @abstractmethod
    def abort(self) -> None:
        """Close all connections, from any thread, so that the waits of all workers for this one end."""

    @abstractmethod
    def failure(self, error: RuntimeError) -> Failure | None:
        """What an error of this transport means; None for one of another kind."""


class GlooTransport(Transport):
    """Connections of gloo, over TCP between CPUs.

    Args:
        store: the key-value store of the job.
        rank: this worker.
        world_size: number of workers.
        generation: counts recoveries; messages of one cannot reach another.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, generation: int) -> None:
        self._rank = rank
        self._world_size = world_size
        store = dist.PrefixStore(f"sar/{generation}/gloo", store)
        limit = timedelta(seconds=CONNECT_TIMEOUT)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, world_size, limit)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """As `Transport.all_gather`."""
        gathered = [torch.empty_like(tensor) for _ in range(self._world_size)]
        self._gloo.allgather([gathered], [tensor], _timed(AllgatherOptions())).wait()
        return gathered

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        """As `Transport.all_reduce`."""
        options = _timed(AllreduceOptions())
        options.reduceOp = op
        self._gloo.allreduce([tensor], options).wait()

    def broadcast(self, tensor: Tensor) -> None:
        """As `Transport.broadcast`; as bytes, because gloo does not know every dtype."""
        options = _timed(BroadcastOptions())
        options.rootRank = 0
        self._gloo.broadcast([tensor.view(-1).view(torch.uint8)], options).wait()

    def post(self, inbound: Message | None, outbound: Message | None, tag: int) -> tuple[Any, Any]:
        """As `Transport.post`; messages meet by tag."""
        receive = None if inbound is None else self._gloo.recv([inbound.data], inbound.peer, tag)
        send = None if outbound is None else self._gloo.send([outbound.data], outbound.peer, tag)
        return receive, send

    def abort(self) -> None:
        """As `Transport.abort`: gloo has no call for it, but a receive that times out closes every connection."""
        for k in range(1, self._world_size):  # the first connection that is open closes all
            peer, nothing = (self._rank + k) % self._world_size, torch.empty(1, dtype=torch.uint8, device="cpu")
            try:
                self._gloo.recv([nothing], peer, CLOSING_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as closed:
                logger.debug("closing connections: %s", closed)

    def failure(self, error: RuntimeError) -> Failure | None:
        """As `Transport.failure`."""
        overdue = any(words in str(error) for words in OVERDUE)
        lost = LOST.search(str(error))
        return None if lost is None and not overdue else Failure(overdue, "" if lost is None else lost[1])


class NcclTransport(GlooTransport):
    """NCCL for what lies on CUDA devices, and gloo for the rest. Untested with more than one worker: it needs two GPUs.

    Args:
        nccl: the process group.
        connections: as of `GlooTransport`.
    """

    def __init__(self, nccl: dist.ProcessGroup, *connections: Any) -> None:
        super().__init__(*connections)
        self._nccl = nccl

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        """As `Transport.all_reduce`."""
        if tensor.is_cuda:
            dist.all_reduce(tensor, op, group=self._nccl)
        else:
            super().all_reduce(tensor, op)

    def broadcast(self, tensor: Tensor) -> None:
        """As `Transport.broadcast`."""
        if tensor.is_cuda:
            dist.broadcast(tensor, dist.get_global_rank(self._nccl, 0), group=self._nccl)
        else:
            super().broadcast(tensor)

    def post(self, inbound: Message | None, outbound: Message | None, tag: int) -> tuple[Any, Any]:
        """As `Transport.post`, both in one batch; messages meet by order."""
        both = [(dist.irecv, inbound), (dist.isend, outbound)]
        given: Sequence[tuple[Any, Message]] = [(verb, message) for verb, message in both if message is not None]
        if not all(message.data.is_cuda for _, message in given):
            return super().post(inbound, outbound, tag)
        works = dist.batch_isend_irecv([
            dist.P2POp(verb, message.data, dist.get_global_rank(self._nccl, message.peer), self._nccl)
            for verb, message in given
        ])  # fmt: skip
        return (works[0] if inbound is not None else None), (works[-1] if outbound is not None else None)


def _timed(options: Any) -> Any:
    """Options of a collective of gloo with the limit of a wait."""
    options.timeout = timedelta(seconds=Config.timeout)
    return options
