"""A background process: samples its share of the batches ahead of the trainer, in step with its like on other workers.

[Note: background processes]
Process k of every worker samples batches k, k + K, k + 2K, ... of an epoch. These processes are a group of their own,
over the job's store, so that they are in step with each other and independent of the trainers' calls. A process samples
as long as the trainer has not taken `credit` of its batches, and sends each as soon as it is made.

It knows of its trainer by the channel: where that closes, because the trainer ended or dropped the iterator, a thread
ends the process, whatever it is waiting for. The trainer knows of the process by the same channel. A process whose
peers fail raises as any worker does, tells its trainer why, and ends.
"""

import os
import queue
import signal
import threading
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sar.comm.allocator import set_allocator
from sar.comm.group import Group
from sar.config import Config
from sar.sampling.batch import Batch, Source, sample_batch
from sar.sampling.channel import receive, send


class Job(NamedTuple):
    """What a process has to know.

    rank, world_size: the worker's.
    store: host and port of the job's store; None for one worker.
    prefix: keys of these processes in the store.
    timeout: `Config.timeout`.
    credit: batches that may be made before the trainer has taken one.
    source: what to sample from.
    """

    rank: int
    world_size: int
    store: tuple[str, int] | None
    prefix: str
    timeout: float
    credit: int
    source: Source


class Share(NamedTuple):
    """Batches of an epoch to make, in order: their seeds and keys."""

    batches: list[tuple[Tensor, int]]


class Taken(NamedTuple):
    """The trainer has taken a batch."""


class Failed(NamedTuple):
    """Why a process ends: the exception's name and message."""

    error: str
    message: str


class Made(NamedTuple):
    """A batch."""

    batch: Batch


def main(descriptor: int, number: int) -> None:
    """Be process `number` of the trainer at the other end of the channel, until that closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer's to handle
    torch.set_num_threads(1)
    set_allocator()
    channel = Connection(descriptor)
    shares: queue.Queue[Share] = queue.Queue()
    credit = threading.Semaphore(0)
    try:
        job: Job = receive(channel, mapped=True)
        threading.Thread(target=_listen, args=(channel, shares, credit), daemon=True).start()
        credit.release(job.credit)
        Config.timeout = job.timeout
        group = _connect(job, number)
        while True:
            for seeds, key in shares.get().batches:
                credit.acquire()
                send(Made(sample_batch(group, job.source, seeds, key)), channel)
    except EOFError:
        os._exit(0)
    except Exception as error:
        send(Failed(type(error).__name__, str(error)), channel)
        os._exit(1)


def _listen(channel: "Connection[Any, Any]", shares: "queue.Queue[Share]", credit: threading.Semaphore) -> None:
    try:
        while True:
            message = receive(channel)
            if isinstance(message, Share):
                shares.put(message)
            else:
                credit.release()
    except (EOFError, OSError):
        os._exit(0)  # also out of a wait for other workers


def _connect(job: Job, number: int) -> Group:
    """An engine among the processes of this number on all workers."""
    store: dist.Store = dist.HashStore()
    if job.store is not None:
        limit = timedelta(seconds=job.timeout)
        store = dist.TCPStore(*job.store, is_master=False, wait_for_workers=False, timeout=limit)
    return Group(dist.PrefixStore(f"{job.prefix}/{number}", store), job.rank, job.world_size, torch.device("cpu"))
