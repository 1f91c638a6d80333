"""Transports between processes, over gloo and NCCL, with a common base class.

Workers find each other, and leave the reasons of their errors, in the job's store (`store_notes.py`). The first
connection also starts the thread that watches for signs of life (`liveness.py`).
"""

import os
import re
import time
from abc import abstractmethod
from concurrent import futures
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

from sar.comm import store_notes
from sar.comm.liveness import Answers, Liveness
from sar.comm.store_notes import POLL_SECONDS, SilentStoreError, StoreNotes, in_background
from sar.comm.transport import LEFT_EARLY, Member, Message, Transport
from sar.config import Config
from sar.errors import CommunicationError, CommunicationTimeout, PeerError
from sar.logging_setup import logger

CONNECT_TIMEOUT: Final = 40.0
"""Seconds that connecting may take once all workers are ready to."""
CLOSING_TAG: Final = 2**31 - 1
GATHERING_TAG: Final = 2**31 - 3  # `liveness.ANSWER_TAG` is in between
LOST: Final = re.compile(r"\[[^ \]]*gloo/transport[^\]]*\] (.*?)(\. |\n|$)")
"""gloo's message for a broken connection. Any other error is this worker's own."""
OVERDUE: Final = ("Timed out waiting", "timeout caused pair closure")
"""gloo's messages for its own time-outs. "timed out" alone may be the system's message for a broken connection."""


class Failure(NamedTuple):
    """Cause of an error of a transport: a wait took too long (`overdue`), or a connection broke for some `reason`."""

    overdue: bool
    reason: str


class ProcessTransport(Transport):
    """Connections between processes that share the key-value store of a job; `device` is by default the CPU."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, device: torch.device | None = None) -> None:
        super().__init__(rank, world_size, device or torch.device("cpu"))
        self.notes = StoreNotes(store, rank, world_size, self.name)
        self.liveness: Liveness | None = None
        self._store = store
        self._open = False

    @abstractmethod
    def _connect(self, generation: int) -> None:
        """Connect to all workers, which are ready to connect."""

    @abstractmethod
    def _close(self) -> None:
        """Close all connections, from any thread, so that the waits of all workers for this one end."""

    @abstractmethod
    def failure(self, error: RuntimeError) -> Failure | None:
        """The cause of an error of this transport; None for any other error."""

    def connect(self, group: Member, limit: float) -> None:
        liveness = self.liveness = self.liveness or Liveness(group, self.notes)
        liveness.answers = None
        try:
            self._wait_for_all(group, limit)
            connecting = in_background(partial(self._connect, group.generation))
            while not connecting.done():
                group.check()
                futures.wait([connecting], POLL_SECONDS)
            connecting.result()
            self._open = True
            liveness.answers = Answers(self)
        except CommunicationError:
            raise
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            late = CommunicationTimeout(
                f"Worker {self.rank} could not connect to all {self.world_size} workers: {why} "
                "Check that all are running; if they are, check SAR_SOCKET_NAME."
            )
            group.abort(late, final=True)
            raise late from error

    def _wait_for_all(self, group: Member, limit: float) -> None:
        """Wait until every worker is ready to connect in this generation. Raise if one fails before that."""
        deadline = time.monotonic() + limit
        ready = [f"{group.generation}/ready/{rank}" for rank in range(self.world_size)]
        self.notes.write(ready[self.rank], "")
        pause = POLL_SECONDS
        while True:
            group.check()
            try:
                note = self.notes.read_note(group.generation)
                if note is not None:
                    failure = PeerError(note.reason)
                    group.abort(failure, final=note.final)
                    raise failure
                absent = self.notes.absent(ready)
                if not absent:
                    return
                signs = self.notes.signs(absent) if pause > store_notes.PATIENCE / 10 else []
                left = [rank for rank, sign in zip(absent, signs, strict=False) if sign == store_notes.LEFT]
            except SilentStoreError:  # the liveness thread decides when the store has been silent for too long
                left = []
            if left:
                raise RuntimeError(f"workers {left} have left.")
            if time.monotonic() > deadline:
                raise RuntimeError(f"workers {self.notes.absent(ready)} did not come within {limit:.0f} s.")
            time.sleep(pause)
            pause = min(1.2 * pause, store_notes.PATIENCE / 5)

    def abort(self, generation: int, own: str, told: str, *, final: bool) -> None:
        """See `Transport.abort`. Leaves a note in the store and closes all connections."""
        try:
            self.notes.leave_note(generation, told, final=final)
        finally:  # Ctrl-C may interrupt the note
            if self._open:
                self._open = False
                self._close()

    def close(self) -> None:
        if self.liveness is not None:
            self.liveness.close()
        self.liveness = None

    def explain(
        self, error: RuntimeError, group: Member, call: str, who: str
    ) -> tuple[CommunicationError, bool] | None:
        failure = self.failure(error)
        if failure is None:
            return None
        overdue, generation, me = failure.overdue, group.generation, self.name(self.rank)
        note = None
        with suppress(RuntimeError):  # the store may have gone with the worker that hosted it
            self.notes.write(f"{generation}/at/{group.calls}/{self.rank}", call)  # for `whereabouts` of others
            note = self.notes.read_note(generation, 0 if overdue else store_notes.PATIENCE)
        if note is not None:
            place = f"({me.capitalize()} was waiting for {who} in: {call})"
            return PeerError(f"{note.reason}\n{place}"), note.final
        if overdue:
            waited = f"{me.capitalize()} waited {Config.timeout:g} s (Config.timeout) for {who} in: {call}"
            # gloo has closed the connections already: leave the note before asking around.
            self.notes.leave_note(generation, f"{me.capitalize()} raised CommunicationTimeout: {waited}", final=False)
            return CommunicationTimeout(f"{waited}\n{self.whereabouts(group, call)}\n{LEFT_EARLY}"), False
        lost = (
            f"The connection to {who} closed without an error message ({failure.reason}): its process died or left, or "
            f"its host or the network is gone, while {me} waited in: {call}\nSee that worker's own output. "
            f"{LEFT_EARLY}\n{self.whereabouts(group, call)}"
        )
        return PeerError(lost), True

    def whereabouts(self, group: Member, call: str) -> str:
        return self.notes.whereabouts(group.generation, group.calls, call)

    def wait(self, work: Any, peer: int) -> None:
        work.wait(timedelta(seconds=Config.timeout))


class GlooTransport(ProcessTransport):
    """Connections of gloo, over TCP between CPUs. Takes the arguments of `ProcessTransport`.

    [Note: gloo's threads]
    gloo runs a collective step by step in another thread. Posting all messages of an agreement at once is faster.

    gloo's receiving thread spins while another thread, to send, holds the lock of the same connection. If a message
    wakes it up and it preempts the sender, it spins until its time slice is over. So we start gloo's threads in the
    batch scheduling class, whose threads preempt no others when they wake up.
    """

    _gloo: Any = None

    def _connect(self, generation: int) -> None:
        store = dist.PrefixStore(f"sar/{generation}/gloo", self._store)
        limit = timedelta(seconds=CONNECT_TIMEOUT)
        # Start gloo's threads in the batch class, if the system has it and the user has not chosen a class.
        usual = hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER
        try:
            with suppress(OSError):  # a sandbox
                if usual:
                    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            self._gloo = dist.ProcessGroupGloo(store, self.rank, self.world_size, limit)
        finally:
            with suppress(OSError):
                if usual:
                    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))

    def _close(self) -> None:
        for k in range(1, self.world_size):  # a time-out on any open connection makes gloo close all
            peer, nothing = (self.rank + k) % self.world_size, torch.empty(1, dtype=torch.uint8, device="cpu")
            try:
                self._gloo.recv([nothing], peer, CLOSING_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as closed:
                logger.debug("closing connections: %s", closed)

    def close(self) -> None:
        super().close()
        self._gloo = None

    def failure(self, error: RuntimeError) -> Failure | None:
        overdue = any(words in str(error) for words in OVERDUE)
        lost = LOST.search(str(error))
        return None if lost is None and not overdue else Failure(overdue, "" if lost is None else lost[1])

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """See `Transport.all_gather`, and [Note: gloo's threads] for the point-to-point messages."""
        gathered = [tensor if rank == self.rank else torch.empty_like(tensor) for rank in range(self.world_size)]
        works = []
        for k in range(1, self.world_size) if tensor.nbytes else ():
            source, reader = (self.rank - k) % self.world_size, (self.rank + k) % self.world_size
            works.append(self._gloo.recv([gathered[source]], source, GATHERING_TAG))
            works.append(self._gloo.send([tensor], reader, GATHERING_TAG))
        end = time.monotonic() + Config.timeout
        for work in works:
            work.wait(timedelta(seconds=max(end - time.monotonic(), 1e-3)))
        return gathered

    def _carrier(self, tensor: Tensor) -> Any:
        """The process group that combines and broadcasts tensors on this device."""
        return self._gloo

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        options = _timed(AllreduceOptions())
        options.reduceOp = op
        self._carrier(tensor).allreduce([tensor], options).wait()

    def broadcast(self, tensor: Tensor) -> None:
        """See `Transport.broadcast`. Sends bytes, because gloo does not support every dtype."""
        options = _timed(BroadcastOptions())
        options.rootRank = 0
        self._carrier(tensor).broadcast([tensor.view(-1).view(torch.uint8)], options).wait()

    def post(self, inbound: Message | None, outbound: Message | None, tag: int) -> tuple[Any, Any]:
        """See `Transport.post`. Messages are matched by tag."""
        receive = None if inbound is None else self._gloo.recv([inbound.data], inbound.peer, tag)
        send = None if outbound is None else self._gloo.send([outbound.data], outbound.peer, tag)
        return receive, send


class _Queued(NamedTuple):
    """Work of NCCL, which runs in a stream of its own."""

    work: Any


class NcclTransport(GlooTransport):
    """NCCL for tensors on GPUs, and gloo for the rest. Untested with more than one worker, as that needs two GPUs.

    [Note: order on the device]
    NCCL has a stream of its own. A message begins there once the device has done all work queued before it was posted.
    A wait makes the computing stream wait for the message, and does not block the host, which goes on to queue the next
    tile's messages; these travel while this tile is computed. After the wait a buffer may be used again, because all
    later work on it, on the device or as a message, is queued behind. So only agreements, which travel over gloo, keep
    the workers' hosts in step, and end their waits if one fails.
    """

    _nccl: Any = None

    def _connect(self, generation: int) -> None:
        """Connect gloo and NCCL. NCCL connects in its first operation, so we start with one among all workers."""
        super()._connect(generation)
        self._nccl = new_nccl(dist.PrefixStore(f"sar/{generation}/nccl", self._store), self.rank, self.world_size)
        met = torch.ones(1, dtype=torch.int32, device=self.device)
        self._nccl.allreduce([met], AllreduceOptions()).wait(timedelta(seconds=CONNECT_TIMEOUT))

    def _close(self) -> None:
        """Abort NCCL, whose kernels would wait on the device for ever, and then close gloo's connections."""
        try:
            self._nccl.abort()
        except RuntimeError as error:
            logger.debug("aborting NCCL: %s", error)
        super()._close()

    def close(self) -> None:
        super().close()
        self._nccl = None

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        if self._carrier(tensor) is self._gloo:
            return super().all_gather(tensor)
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self._nccl.allgather([gathered], [tensor], _timed(AllgatherOptions())).wait()
        return gathered

    def _carrier(self, tensor: Tensor) -> Any:
        return self._nccl if tensor.device.type == self.device.type else self._gloo

    def failure(self, error: RuntimeError) -> Failure | None:
        if isinstance(error, dist.DistBackendError):
            return Failure(False, str(error).partition("\n")[0])
        return super().failure(error)

    def post(self, inbound: Message | None, outbound: Message | None, tag: int) -> tuple[Any, Any]:
        """See `Transport.post`. Both messages are bytes, in one batch with a common wait, and are matched by order."""
        messages = [message for message in (inbound, outbound) if message is not None]
        if not all(self._carrier(message.data) is self._nccl for message in messages):
            return super().post(inbound, outbound, tag)
        self._nccl._start_coalescing()
        if inbound is not None:
            self._nccl.recv([inbound.data.view(-1).view(torch.uint8)], inbound.peer, tag)
        if outbound is not None:
            self._nccl.send([outbound.data.view(-1).view(torch.uint8)], outbound.peer, tag)
        both = _Queued(self._nccl._end_coalescing())
        return (None if inbound is None else both), (None if outbound is None else both)

    def wait(self, work: Any, peer: int) -> None:
        """See `Transport.wait`. For NCCL, only the computing stream waits: see [Note: order on the device]."""
        if isinstance(work, _Queued):
            work.work.wait()  # without a limit, which would block the host; the process group has one
        else:
            super().wait(work, peer)


def new_nccl(store: dist.Store, rank: int, world_size: int) -> Any:
    """NCCL's process group. Its first operation creates the communicator."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=Config.timeout)
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


def _timed(options: Any) -> Any:
    """Set the timeout of a collective's options to `Config.timeout`."""
    options.timeout = timedelta(seconds=Config.timeout)
    return options
