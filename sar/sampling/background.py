"""The trainer's side of background processes: starting them, handing out work, and noticing how they end."""

import os
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Pipe
from typing import Any

import torch.distributed as dist
from torch import Tensor

from sar.comm import session
from sar.config import Config
from sar.errors import CommunicationTimeout, ConfigError, SamplingError
from sar.sampling.batch import Batch, SamplingSource
from sar.sampling.channel import receive, send
from sar.sampling.process import TAKEN, Failure, ProcessSettings

POLL_SECONDS = 1.0
CLOSE_SECONDS = 5.0
"""How long a process may take to end before it is killed."""


class Processes:
    """This worker's background processes: see [Note: background processes] in `process.py`.

    Made by all workers together, inside `group.guard()`.

    Args:
        source: what to sample from; copied to shared memory that all processes read.
        count: number of processes.
        ahead: batches that each makes before the trainer takes one.

    Raises:
        ConfigError: where the processes could not find those of other workers.
    """

    def __init__(self, source: SamplingSource, count: int, ahead: int) -> None:
        group, call = session.current_group(), f"starting {count} sampling processes, {ahead} batches ahead each"
        if len(group.local_peers) > 1:
            raise ConfigError(
                "Virtual workers (SAR_RESIDENT) cannot have background processes; leave num_workers at 0."
            )
        group.agree(call)
        name = group.new_name(call)
        self.source = source
        self._rank = group.rank
        address = _store_address() if group.world_size > 1 else None
        self._processes: list[_Process] = []
        self._finalizer = weakref.finalize(self, _end, self._processes)
        self._processes += [_Process(number) for number in range(count)]
        job = ProcessSettings(
            group.rank, group.world_size, address, f"sar/sampling/{name}", Config.timeout, ahead, source
        )
        send(job, *(process.channel for process in self._processes))

    @property
    def pids(self) -> list[int]:
        """Process IDs."""
        return [process.process.pid for process in self._processes]

    def sample(self, batches: Sequence[tuple[Tensor, int]]) -> Iterator[Batch]:
        """Sample an epoch: batches of these seeds and keys, in order.

        Raises:
            SamplingError: where a process died or failed; the others are ended.
            CommunicationTimeout: where a batch takes longer than `Config.timeout`.
        """
        count = len(self._processes)
        for number, process in enumerate(self._processes):
            send(batches[number::count], process.channel)
        for number in range(len(batches)):
            process = self._processes[number % count]
            who = f"sampling process {number % count} of worker {self._rank}"
            message = process.receive(who)
            if isinstance(message, Failure):
                raise SamplingError(f"The {who} failed with {message.error}: {message.message}")
            send(TAKEN, process.channel)
            yield message

    def close(self) -> None:
        """End all processes."""
        self._finalizer()


class _Process:
    """One process and the channel to it."""

    def __init__(self, number: int) -> None:
        self.channel, theirs = Pipe()
        with theirs:
            # Not by `multiprocessing`, whose spawned processes import the user's script again.
            start = f"from sar.sampling.process import main; main({theirs.fileno()}, {number})"
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {start}"],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "SAR_ALLOCATOR": Config.allocator},
                pass_fds=[theirs.fileno()],
            )

    def receive(self, who: str) -> Any:
        """Its next message; an error where it is gone, or makes none."""
        deadline = time.monotonic() + Config.timeout + CLOSE_SECONDS  # its own error comes first
        while not self.channel.poll(POLL_SECONDS):
            session.current_group().check()  # another worker may have heard first that it is frozen
            if time.monotonic() > deadline:
                raise CommunicationTimeout(
                    f"The {who} made no batch within {Config.timeout:g} s (Config.timeout); is another worker's stuck?"
                )
        try:
            return receive(self.channel)
        except (EOFError, OSError) as error:
            raise SamplingError(
                f"The {who} {self._end()} before it had made its batch. See its own output; signal 9 often comes from "
                "the system, for want of memory."
            ) from error

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


def _end(processes: "list[_Process]") -> None:
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
