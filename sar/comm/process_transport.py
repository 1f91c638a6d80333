"""The transport between processes: gloo, and NCCL for tensors on GPUs.

Workers find each other, and leave the reasons of their errors, in the job's store, over a separate connection if
torch supports it. Requests are bounded in time: see [Note: a store that does not answer].
"""

import json
import os
import re
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

from sar.comm.store import POLL_SECONDS, STORE_SECONDS, bounded, poll, unanswered
from sar.comm.transport import LEFT_EARLY, Failure, Message, Transport, Wait
from sar.config import Config
from sar.errors import CommunicationError, CommunicationTimeout, PeerError
from sar.logging_setup import logger

CONNECT_TIMEOUT: Final = 40.0
"""Seconds that connecting may take once all workers are ready to."""
PATIENCE = 3.0
"""Seconds to wait for a text that a peer writes at about the same time, such as before it closes its connections."""
CLOSING_TAG: Final = 2**31 - 1
GATHERING_TAG: Final = 2**31 - 2
LOST: Final = re.compile(r"\[[^ \]]*gloo/transport[^\]]*\] (.*?)(\. |\n|$)")
"""gloo's message for a broken connection. Any other error is this worker's own."""
OVERDUE: Final = ("Timed out waiting", "timeout caused pair closure")
"""gloo's messages for its own time-outs. Just "timed out" may be the system's message for a broken connection."""


class ProcessTransport(Transport):
    """Connections between processes that share a store, over TCP by gloo. `device` is by default the CPU.

    Tensors of another device travel by NCCL, which is untested with more than one worker, as that needs two GPUs.

    [Note: gloo's threads]
    gloo runs a collective step by step in another thread. Posting all messages of an agreement at once is faster.

    gloo's receiving thread spins while another thread, to send, holds the lock of the same connection. If a message
    wakes it up and it preempts the sender, it spins until its time slice is over. So we start gloo's threads in the
    batch scheduling class, whose threads preempt no others when they wake up.

    [Note: order on the device]
    NCCL has a separate stream. A message begins there once the device has done all work queued before it was posted.
    A wait makes the computing stream wait for the message, and does not block the host, which goes on to queue the next
    tile's messages; these travel while this tile is computed. After the wait a buffer may be used again, because all
    later work on it, on the device or as a message, is queued behind. So only agreements, which travel over gloo, keep
    the workers' hosts in step, and end their waits if one fails.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, device: torch.device | None = None) -> None:
        super().__init__(rank, world_size, device)
        self._store = store
        own = store.clone() if world_size > 1 and hasattr(store, "clone") else store
        self._notes = dist.PrefixStore("sar", own)  # for notes to other workers
        place = f"{socket.gethostname()}, process {os.getpid()}, {secrets.token_hex(4)}"
        self._mark = f"Worker {rank} of {world_size} ({place})"  # by which others tell if it belongs to them
        self._generation = 0
        self._absent: list[int] = []  # workers that are not ready to connect
        self._open = False
        self._gloo: Any = None
        self._nccl: Any = None  # None for tensors on the CPU

    # -- connections

    def connect(self, group: Any, limit: float) -> None:
        """See `Transport.connect`. First waits until every worker is ready to connect in this generation."""
        self._generation, self._absent, self.awaited = group.generation, [], None
        try:
            poll(
                partial(bounded, self._all_ready),
                self.rank,
                lambda: f"{', '.join(map(self.name, self._absent)) or 'others'} to join",
                limit,
            )
            bounded(self._connect, CONNECT_TIMEOUT + STORE_SECONDS)
            self._open = True
        except CommunicationError as error:
            error.final = error.final or not isinstance(error, PeerError)  # of another worker, which says it itself
            raise
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            late = CommunicationTimeout(
                f"Worker {self.rank} could not connect to all {self.world_size} workers: {why} "
                "Check that all are running; if they are, check SAR_SOCKET_NAME."
            )
            late.final = True
            raise late from error

    def _all_ready(self) -> bool | None:
        """Tell the others that this worker is ready to connect; returns True if all are."""
        ready = [f"{self._generation}/ready/{rank}" for rank in range(self.world_size)]
        own = self._notes.compare_set(ready[self.rank], "", self._mark).decode()
        failure = self.read_note(self._generation)
        if failure is not None:
            error = PeerError(failure.for_others)
            error.final = failure.final
            raise error
        marks = self._read(ready)
        strangers = [mark for mark in marks if mark is not None and f" of {self.world_size} (" not in mark]
        if own != self._mark or strangers:
            self._notes = dist.PrefixStore(f"sar/{self._mark}", self._store)  # the job goes on without this worker
            raise CommunicationError(
                f"{self._mark} does not fit {own if own != self._mark else strangers[0]}: the workers of a job "
                "have different ranks and the same world size. If these are two jobs, use a different port or "
                "SAR_JOB_ID for each."
            )
        self._absent = [rank for rank, mark in enumerate(marks) if mark is None]
        gone = self._read([f"left/{rank}" for rank in self._absent])
        left = [rank for rank, mark in zip(self._absent, gone, strict=True) if mark is not None]
        if left:
            raise RuntimeError(f"workers {left} have left.")
        return None if self._absent else True

    def _connect(self) -> None:
        """Connect to all workers, which are ready to connect."""
        limit = timedelta(seconds=CONNECT_TIMEOUT)
        # Start gloo's threads in the batch class, if the system has it and the user has not chosen a class.
        usual = hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER
        try:
            with suppress(OSError):  # a sandbox
                if usual:
                    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            store = dist.PrefixStore(f"sar/{self._generation}/gloo", self._store)
            self._gloo = dist.ProcessGroupGloo(store, self.rank, self.world_size, limit)
        finally:
            with suppress(OSError):
                if usual:
                    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        if self.device.type != "cpu":  # NCCL connects in its first operation, which has to be one among all workers
            store = dist.PrefixStore(f"sar/{self._generation}/nccl", self._store)
            self._nccl = new_nccl(store, self.rank, self.world_size)
            met = torch.ones(1, dtype=torch.int32, device=self.device)
            self._nccl.allreduce([met], AllreduceOptions()).wait(limit)

    def abort(self, generation: int, failure: Failure) -> None:
        """See `Transport.abort`. Leaves a note in the store, unless there is one, and closes all connections."""
        try:
            bounded(partial(self._notes.compare_set, f"{generation}/note", "", json.dumps(failure)))
        except RuntimeError:
            logger.warning("the store is gone; other workers will see only closed connections")
        finally:  # Ctrl-C may interrupt the note
            if self._open:
                self._open = False
                self._close()

    def _close(self) -> None:
        """Close all connections, from any thread, so that the waits of all workers for this one end."""
        if self._nccl is not None:  # its kernels would wait on the device for ever
            try:
                self._nccl.abort()
            except RuntimeError as error:
                logger.debug("aborting NCCL: %s", error)
        for k in range(1, self.world_size):  # a time-out on any open connection makes gloo close all
            peer, nothing = (self.rank + k) % self.world_size, torch.empty(1, dtype=torch.uint8, device="cpu")
            try:
                self._gloo.recv([nothing], peer, CLOSING_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as closed:
                logger.debug("closing connections: %s", closed)

    def close(self) -> None:
        with suppress(RuntimeError):  # the store is gone
            if not unanswered():  # in this thread, as none can start while the interpreter ends
                self._notes.set(f"left/{self.rank}", "")
        self._gloo = self._nccl = None

    # -- errors, with the reasons and calls that workers leave in the store

    def read_note(self, generation: int, patience: float = 0.0) -> Failure | None:
        """The first note of a generation, if one appears within `patience` seconds."""
        [text] = self._read([f"{generation}/note"], patience)
        return None if text is None else Failure(*json.loads(text))

    def _read(self, keys: Sequence[str], patience: float = 0.0) -> list[str | None]:
        """The values of these keys of the store; waits up to `patience` seconds until all exist."""
        deadline = time.monotonic() + patience
        while True:
            values = [self._notes.get(key).decode() if self._notes.check([key]) else None for key in keys]
            if None not in values or time.monotonic() >= deadline:
                return values
            time.sleep(POLL_SECONDS)

    def _whereabouts(self, call: str) -> str:
        """The call that each worker is in, one line per worker; those that fail report it at about the same time."""
        ranks = range(self.world_size)

        def ask() -> tuple[list[str | None], list[str | None]]:
            self._notes.set(f"{self._generation}/at/{self.rank}", call)
            calls = self._read([f"{self._generation}/at/{rank}" for rank in ranks], PATIENCE)
            return calls, self._read([f"left/{rank}" for rank in ranks])

        try:
            calls, gone = bounded(ask, STORE_SECONDS + PATIENCE)
        except RuntimeError:
            return "  the store cannot be reached: the process that hosts it, usually worker 0, has ended or is frozen"
        silent = "no answer: it computes, or its process is frozen or dead, or its host has vanished"
        states = [silent if mark is None else "has ended" for mark in gone]
        return "\n".join(f"  {self.name(rank)}: {calls[rank] or states[rank]}" for rank in ranks)

    def explain(self, error: RuntimeError, call: str, peer: int | None) -> CommunicationError | None:
        text = str(error)
        overdue, lost = any(words in text for words in OVERDUE), LOST.search(text)
        if not (overdue or lost or isinstance(error, dist.DistBackendError)):
            return None
        me, who = self.name(self.rank).capitalize(), self.name(peer if self.awaited is None else self.awaited)
        self.awaited, patience = None, 0 if overdue else PATIENCE

        def ask() -> Failure | None:
            self._notes.set(f"{self._generation}/at/{self.rank}", call)  # for `_whereabouts` of others
            return self.read_note(self._generation, patience)

        note: Failure | None = None
        with suppress(RuntimeError):  # the store may have gone with the worker that hosted it
            note = bounded(ask, STORE_SECONDS + patience)
        cause: CommunicationError
        if note is not None:
            cause = PeerError(f"{note.for_others}\n({me} was waiting for {who} in: {call})")
            cause.final = note.final
        elif overdue:
            waited = f"{me} waited {Config.timeout:g} s (Config.timeout) for {who} in: {call}"
            # gloo has closed the connections already: leave the note before asking around.
            self.abort(self._generation, Failure(waited, f"{me} raised CommunicationTimeout: {waited}", final=False))
            cause = CommunicationTimeout(f"{waited}\n{self._whereabouts(call)}\n{LEFT_EARLY}")
        else:
            reason = text.partition("\n")[0] if lost is None else lost[1]
            cause = PeerError(
                f"The connection to {who} closed without an error message ({reason}): its process died or left, or its "
                f"host or the network is gone, while {self.name(self.rank)} waited in: {call}\n"
                f"See that worker's own output. {LEFT_EARLY}\n{self._whereabouts(call)}"
            )
            cause.final = True
        return cause

    # -- operations

    def _carrier(self, tensor: Tensor) -> Any:
        """The process group that combines and broadcasts tensors on this device."""
        return self._gloo if self._nccl is None or tensor.device.type != self.device.type else self._nccl

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """See `Transport.all_gather`, and [Note: gloo's threads] for the point-to-point messages."""
        if self._nccl is not None and self._carrier(tensor) is self._nccl:
            gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
            self._nccl.allgather([gathered], [tensor], _timed(AllgatherOptions())).wait()
            return gathered
        gathered, works = [tensor] * self.world_size, []
        for k in range(1, self.world_size):
            source, reader = (self.rank - k) % self.world_size, (self.rank + k) % self.world_size
            gathered[source] = torch.empty_like(tensor)
            if tensor.nbytes == 0:
                continue
            works.append((source, self._gloo.recv([gathered[source]], source, GATHERING_TAG)))
            works.append((reader, self._gloo.send([tensor], reader, GATHERING_TAG)))
        end = time.monotonic() + Config.timeout
        for peer, work in works:
            self.awaited = peer
            work.wait(timedelta(seconds=max(end - time.monotonic(), 1e-3)))
        self.awaited = None
        return gathered

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        options = _timed(AllreduceOptions())
        options.reduceOp = op
        self._carrier(tensor).allreduce([tensor], options).wait()

    def broadcast(self, tensor: Tensor) -> None:
        """See `Transport.broadcast`. Sends bytes, because gloo does not support every dtype."""
        options = _timed(BroadcastOptions())
        options.rootRank = 0
        self._carrier(tensor).broadcast([tensor.view(-1).view(torch.uint8)], options).wait()

    def post(self, inbound: Message | None, outbound: Message | None, tag: int) -> tuple[Wait | None, Wait | None]:
        """See `Transport.post`. gloo matches messages by tag.

        NCCL's are bytes, in one batch with a common wait, and are matched by order. Only the computing stream waits for
        them, see [Note: order on the device], and without a limit, which would block the host; NCCL has its own.
        """
        message = inbound or outbound
        if self._nccl is None or message is None or self._carrier(message.data) is self._gloo:
            limit = timedelta(seconds=Config.timeout)
            receive = inbound and partial(self._gloo.recv([inbound.data], inbound.peer, tag).wait, limit)
            send = outbound and partial(self._gloo.send([outbound.data], outbound.peer, tag).wait, limit)
            return receive, send
        self._nccl._start_coalescing()
        if inbound is not None:
            self._nccl.recv([inbound.data.view(-1).view(torch.uint8)], inbound.peer, tag)
        if outbound is not None:
            self._nccl.send([outbound.data.view(-1).view(torch.uint8)], outbound.peer, tag)
        both = self._nccl._end_coalescing().wait
        return inbound and both, outbound and both


def new_nccl(store: dist.Store, rank: int, world_size: int) -> Any:
    """NCCL's process group. Its first operation creates the communicator."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=Config.timeout)
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


def _timed(options: Any) -> Any:
    """Set the timeout of a collective's options to `Config.timeout`."""
    options.timeout = timedelta(seconds=Config.timeout)
    return options
