"""Background processes, which sample batches ahead of the trainer, and the trainer's side of them.

[Note: background processes]
Process k of every worker samples batches k, k + K, k + 2K, ... of an epoch. These processes are a group of their own,
over the job's store, so that they are in step with each other and independent of the trainers' calls. A process samples
as long as fewer than `ahead` of its batches wait for the trainer, and sends each as soon as it is made.

It knows of its trainer by the channel: where that closes, because the trainer ended or dropped the iterator, a thread
ends the process, whatever it is waiting for. The trainer knows of the process by the same channel. A process whose
peers fail raises as any worker does, tells its trainer why, and ends.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from sar.comm import session
from sar.comm.allocator import set_allocator
from sar.config import Config
from sar.errors import CommunicationTimeout, ConfigError, SamplingError
from sar.sampling.batch import Batch, SamplingSource, sample_batch
from sar.sampling.batch_memory import receive, send

POLL_SECONDS = 1.0
CLOSE_SECONDS = 5.0  # how long a process may take to end before it is killed
TAKEN: Final = "taken"
"""What the trainer says when it has taken a batch. Its other messages are lists of batches to make."""

Order = tuple[Tensor, int]  # seeds and key of a batch to make


@dataclass(frozen=True)
class _Job:
    """What a process has to know."""

    rank: int  # of the worker
    world_size: int
    store: tuple[str, int] | None  # host and port of the job's store; None for one worker
    prefix: str  # of these processes' keys in the store
    timeout: float  # `Config.timeout`
    ahead: int  # batches that may be made before the trainer has taken one
    source: SamplingSource


class SamplingProcesses:
    """This worker's background processes: see [Note: background processes].

    Made by all workers together, inside `group.guard()`. `source` is copied to shared memory that all processes read;
    each of them makes `ahead` batches before the trainer takes one. Raises `ConfigError` where the processes could not
    find those of other workers.
    """

    def __init__(self, source: SamplingSource, count: int, ahead: int) -> None:
        group, call = session.current_group(), f"starting {count} sampling processes, {ahead} batches ahead each"
        if len(group.local_peers) > 1:
            raise ConfigError(
                "Workers that share a process (SAR_RESIDENT) cannot have background processes; leave num_workers at 0."
            )
        group.agree(call)
        name = group.new_name(call)
        self.source = source
        self._rank = group.rank
        address = _store_address() if group.world_size > 1 else None
        self._processes: list[_Process] = []
        self._finalizer = weakref.finalize(self, _end, self._processes)
        self._processes += [_Process(k, f"sampling process {k} of worker {group.rank}") for k in range(count)]
        job = _Job(group.rank, group.world_size, address, f"sar/sampling/{name}", Config.timeout, ahead, source)
        send(job, *(process.channel for process in self._processes))

    def sample(self, batches: Sequence[Order]) -> Iterator[Batch]:
        """Sample an epoch: batches of these seeds and keys, in order. Raises as `_Process.receive`."""
        count = len(self._processes)
        for number, process in enumerate(self._processes):
            send(batches[number::count], process.channel)
        for number in range(len(batches)):
            process = self._processes[number % count]
            batch = process.receive()
            send(TAKEN, process.channel)
            yield batch

    def close(self) -> None:
        """End all processes."""
        self._finalizer()


class _Process:
    """One process and the channel to it; `name` is for errors."""

    def __init__(self, number: int, name: str) -> None:
        self.name = name
        self.channel, theirs = Pipe()
        with theirs:
            # Not by `multiprocessing`, whose spawned processes import the user's script again.
            start = f"from sar.sampling.background import run; run({theirs.fileno()}, {number})"
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {start}"],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "SAR_ALLOCATOR": Config.allocator},
                pass_fds=[theirs.fileno()],
            )

    def receive(self) -> Batch:
        """Its next batch; `SamplingError` where it failed or is gone, `CommunicationTimeout` where it makes none."""
        deadline = time.monotonic() + Config.timeout + CLOSE_SECONDS  # its own error comes first
        while not self.channel.poll(POLL_SECONDS):
            session.current_group().check()  # another worker may have heard first that it is frozen
            if time.monotonic() > deadline:
                raise CommunicationTimeout(
                    f"The {self.name} made no batch within {Config.timeout:g} s (Config.timeout); is another worker's "
                    "stuck?"
                )
        try:
            message: Batch | str = receive(self.channel)
        except (EOFError, OSError) as error:
            raise SamplingError(
                f"The {self.name} {self._end()} before it had made its batch. See its own output; signal 9 often comes "
                "from the system, for want of memory."
            ) from error
        if isinstance(message, str):
            raise SamplingError(f"The {self.name} failed with {message}")
        return message

    def _end(self) -> str:
        status = self.wait(CLOSE_SECONDS)
        if status is None:
            return "closed its channel"
        return f"got signal {-status}" if status < 0 else f"exited ({status})"

    def wait(self, seconds: float) -> int | None:
        """Its exit status, if it ends in time."""
        try:
            return self.process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            return None


def _end(processes: list[_Process]) -> None:
    for process in processes:
        process.channel.close()
    deadline = time.monotonic() + CLOSE_SECONDS
    for process in processes:
        if process.wait(deadline - time.monotonic()) is None:
            process.process.kill()
            process.process.wait()


def _store_address() -> tuple[str, int]:
    """Host and port of the store over which the workers found each other."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        raise ConfigError(
            f"num_workers > 0 needs a process group over TCP, but this one has a {type(store).__name__}; use "
            "sar.initialize_comms or init_method='tcp://...', or set num_workers=0."
        )
    return store.host, store.port


def run(descriptor: int, number: int) -> None:
    """Be process `number` of the trainer at the other end of the channel, until that closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer's to handle
    torch.set_num_threads(1)
    set_allocator(batches=True)
    channel = Connection(descriptor)
    orders: queue.Queue[list[Order]] = queue.Queue()
    try:
        job: _Job = receive(channel, mapped=True)
        allowed = threading.Semaphore(job.ahead)
        threading.Thread(target=_listen, args=(channel, orders, allowed), daemon=True).start()
        Config.timeout = job.timeout
        store: dist.Store = dist.HashStore()
        if job.store is not None:
            limit = timedelta(seconds=job.timeout)
            store = dist.TCPStore(*job.store, is_master=False, wait_for_workers=False, timeout=limit)
        store = dist.PrefixStore(f"{job.prefix}/{number}", store)
        group = session.group_of_processes(store, job.rank, job.world_size)
        while True:
            for seeds, key in orders.get():
                allowed.acquire()
                send(sample_batch(group, job.source, seeds, key), channel)
    except EOFError:
        os._exit(0)
    except Exception as error:
        traceback.print_exc()
        send(f"{type(error).__name__}: {error}", channel)
        os._exit(1)


def _listen(channel: "Connection[Any, Any]", orders: queue.Queue[list[Order]], allowed: threading.Semaphore) -> None:
    try:
        while True:
            message = receive(channel)
            if message == TAKEN:
                allowed.release()
            else:
                orders.put(message)
    except (EOFError, OSError):
        os._exit(0)  # also out of a wait for other workers
