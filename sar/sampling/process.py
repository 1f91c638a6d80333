"""A background process: samples its share of the batches ahead of the trainer, in step with its like on other workers.

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
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from sar.comm.allocator import set_allocator
from sar.comm.group import Group
from sar.comm.process_transport import GlooTransport
from sar.config import Config
from sar.sampling.batch import SamplingSource, sample_batch
from sar.sampling.channel import receive, send

TAKEN: Final = "taken"
"""What the trainer says when it has taken a batch. Its other messages are lists of batches to make."""


@dataclass(frozen=True)
class ProcessSettings:
    """What a process has to know.

    rank, world_size: the worker's.
    store: host and port of the job's store; None for one worker.
    prefix: keys of these processes in the store.
    timeout: `Config.timeout`.
    ahead: batches that may be made before the trainer has taken one.
    source: what to sample from.
    """

    rank: int
    world_size: int
    store: tuple[str, int] | None
    prefix: str
    timeout: float
    ahead: int
    source: SamplingSource


@dataclass(frozen=True)
class Failure:
    """Why a process ends: the exception's name and message."""

    error: str
    message: str


def main(descriptor: int, number: int) -> None:
    """Be process `number` of the trainer at the other end of the channel, until that closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer's to handle
    torch.set_num_threads(1)
    set_allocator()
    channel = Connection(descriptor)
    orders: queue.Queue[list[tuple[Tensor, int]]] = queue.Queue()
    try:
        job: ProcessSettings = receive(channel, mapped=True)
        allowed = threading.Semaphore(job.ahead)
        threading.Thread(target=_listen, args=(channel, orders, allowed), daemon=True).start()
        Config.timeout = job.timeout
        group = _connect(job, number)
        while True:
            for seeds, key in orders.get():
                allowed.acquire()
                send(sample_batch(group, job.source, seeds, key), channel)
    except EOFError:
        os._exit(0)
    except Exception as error:
        traceback.print_exc()
        send(Failure(type(error).__name__, str(error)), channel)
        os._exit(1)


def _listen(
    channel: "Connection[Any, Any]", orders: "queue.Queue[list[tuple[Tensor, int]]]", allowed: threading.Semaphore
) -> None:
    try:
        while True:
            message = receive(channel)
            if message == TAKEN:
                allowed.release()
            else:
                orders.put(message)
    except (EOFError, OSError):
        os._exit(0)  # also out of a wait for other workers


def _connect(job: ProcessSettings, number: int) -> Group:
    """A group of the processes of this number on all workers."""
    store: dist.Store = dist.HashStore()
    if job.store is not None:
        limit = timedelta(seconds=job.timeout)
        store = dist.TCPStore(*job.store, is_master=False, wait_for_workers=False, timeout=limit)
    return Group(GlooTransport(dist.PrefixStore(f"{job.prefix}/{number}", store), job.rank, job.world_size))
