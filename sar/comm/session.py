"""This worker's group, and accessors such as `rank` and `world_size`. `setup.py` makes the group."""

import atexit
import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist

from sar.comm.group import Group
from sar.comm.process_transport import ProcessTransport
from sar.comm.store import HEARD_SECONDS
from sar.comm.transport import Transport
from sar.errors import NotInitializedError
from sar.host.signals import note_signals, signal_noted


class Job(NamedTuple):
    """The backend of this process's job, the address of worker 0, and torch's objects."""

    backend: str
    master_ip: str | None = None
    master_port: int | None = None
    processes: Any = None  # torch's group of all workers
    store: Any = None  # this job's part of the store


_group: Group | None = None
_job = Job("none")
_beside: Final[WeakSet[Group]] = WeakSet()  # groups of other threads


def group_beside(name: str) -> Group:
    """A second group of the same processes, for another thread: messages of the two never meet.

    All workers pass the same `name`, which no other group of the job has. The group is on the CPU.
    """
    group, transport = current_group(), Transport(0, 1)
    if group.world_size > 1:
        store = dist.PrefixStore(f"sar/{name}", _job.store)
        transport = ProcessTransport(store, group.rank, group.world_size)
    beside = Group(transport, counted=False)
    _beside.add(beside)
    return beside


def set_current(group: Group, job: Job | None = None) -> None:
    """Replace this worker's group. Workers of one process do so with their turns."""
    global _group, _job
    _group, _job = group, job or _job


@contextmanager
def standing_in(group: Group) -> Iterator[None]:
    """Context with another group, such as a plan's, which sends nothing."""
    global _group
    before, _group = _group, group
    try:
        yield
    finally:
        _group = before


def is_initialized() -> bool:
    """Whether `initialize_comms` has been called."""
    return _group is not None


def has_peers() -> bool:
    """Whether this worker is connected to others."""
    return _group is not None and _group.world_size > 1


def current_group() -> Group:
    """This worker's end of the current group; raises NotInitializedError before `initialize_comms`."""
    if _group is None:
        raise NotInitializedError("Communication is not set up; call sar.initialize_comms() first, on every worker.")
    return _group


def rank() -> int:
    """This worker's rank, from 0."""
    return current_group().rank


def world_size() -> int:
    """The number of workers."""
    return current_group().world_size


def comm_device() -> torch.device:
    """The device of tensors that workers send."""
    return current_group().device


def job() -> Job:
    """This process's job; raises NotInitializedError before `initialize_comms`."""
    current_group()
    return _job


def backend() -> str:
    """The backend of `torch.distributed`."""
    return job().backend


def master_ip() -> str | None:
    """The address of worker 0; None if the process group was created outside sar."""
    return job().master_ip


def master_port() -> int | None:
    """The port of worker 0; None if the process group was created outside sar."""
    return job().master_port


def shut_down(group: Group, *, started: bool) -> None:
    """Join gloo's threads before the interpreter shuts down. During the shutdown, the process would sometimes abort."""
    if started and group.rank == 0 and group.world_size > 1 and group.failure is not None:
        time.sleep(HEARD_SECONDS)  # this process hosts the store, where other workers look for the error
    group.close()
    if started and dist.is_initialized():
        dist.destroy_process_group()


def _in_child() -> None:
    """Disable distributed calls in a forked process. All connections belong to its parent."""
    if _group is not None:
        atexit.unregister(shut_down)
        groups = [_group, *_beside]
        for group in groups:
            group.leave_to_parent()
        # gloo's destructor would wait for the parent's threads.
        for kept in (*groups, *dist.distributed_c10d._world.pg_map):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


os.register_at_fork(after_in_child=_in_child)


def recover(step: int = 0) -> int:
    """Resume after an error in a distributed call. All workers must call this together.

    After such an error every further distributed call raises. All workers, including those without an error, call
    `recover` and repeat the step that it returns. With one worker it does nothing.

    Args:
        step: the first step that this worker has not finished. Default 0.

    Returns:
        The minimum of `step` over all workers.

    Raises:
        PeerError: a worker has died or left, which is final, or raised an error during recovery.
        CommunicationTimeout: a worker does not call this within five minutes, or `Config.timeout` if less.
    """
    return current_group().recover(step)


def should_stop() -> bool:
    """Return whether any worker has received SIGTERM or SIGUSR1, which schedulers send before they end a job.

    The result is the same on all workers. The signal travels with the next distributed call, such as `gather_grads`, so
    this call sends nothing. From the first call on, the two signals no longer end the process, and earlier handlers are
    not called.
    """
    group = current_group()
    note_signals()
    return group.stopping or (group.world_size == 1 and signal_noted())
