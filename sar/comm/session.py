"""This worker's group: joining the job, recovery, and accessors such as `rank` and `world_size`."""

import atexit
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist

from sar.comm.allocator import set_allocator
from sar.comm.environment import Place, choose_interface, find_place
from sar.comm.group import Group
from sar.comm.joining import announced_stores, open_store, sign_in, stop_announcing
from sar.comm.process_transport import GlooTransport, NcclTransport
from sar.comm.replicas import Replicas
from sar.comm.rows import BufferPool
from sar.comm.store_notes import HEARD_SECONDS
from sar.config import Config
from sar.errors import CommunicationError, ConfigError, NotInitializedError, SarError
from sar.logging_setup import logger, print_errors_briefly

DEFAULT_PORT = 12345
BACKENDS = ("gloo", "nccl", "mpi", "ccl")
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


class Communication(NamedTuple):
    """This worker's group and buffers, and the backend and address of its process group."""

    group: Group
    pool: BufferPool  # for this worker's exchanges
    backend: str
    master_ip: str | None
    master_port: int | None


_current: Communication | None = None
_beside: Final[WeakSet[Group]] = WeakSet()  # groups of other threads


def connect(
    rank: int | None,
    world_size: int | None,
    master: str | None,
    backend: str | None,
    device: torch.device | str | None,
    port: int,
    *,
    shares_process: bool,
) -> None:
    """Join this process to its job, with the arguments and errors of `sar.initialize_comms`.

    If workers are to share this process, its memory is set up for them, and models are compared by them alone.
    """
    global _current
    print_errors_briefly()  # before torch.distributed starts, which puts the rank before each line
    Config.validate()
    if backend is not None and (backend not in BACKENDS or not dist.is_backend_available(backend)):
        raise ConfigError(
            f"This torch has no backend {backend!r}; expected one of {', '.join(BACKENDS)}. For ccl, import its "
            "package first, oneccl_bindings_for_pytorch."
        )
    existing = dist.is_initialized()
    present: tuple[int | str, ...] = ()
    if _current is not None:
        present = _current.group.rank, _current.group.world_size, _current.backend
    elif existing:
        present = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    named = ("rank", "world size", "backend")
    for what, asked, there in zip(named, (rank, world_size, backend), present, strict=False):
        if asked not in (None, there):
            raise ConfigError(f"initialize_comms asks for {what} {asked}, but the existing process group has {there}.")
    if _current is not None:
        return
    set_allocator(spilled=shares_process)
    if os.environ.get("SAR_LAUNCHER") == str(os.getppid()):  # if it is killed, it cannot end its workers
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    # 1. The place in the job: arguments, else the results of `nfs_ip_init`, else the launcher's variables.
    place, backend = find_place(), dist.get_backend() if existing else backend or "gloo"
    tensors_on = _choose_device(device, backend, place.local_rank)
    announced = next((store for store in reversed(announced_stores) if store.address == master), None)
    job = os.environ.get("SAR_JOB_ID")
    if announced is not None:
        job, port = job or announced.nonce, announced.store.port if port == DEFAULT_PORT else port
    if job is None and (rank is None or place.launcher == "torchrun" or existing):
        job = place.job
    torchrun_hosts = master is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if existing:
        own_rank, size = dist.get_rank(), dist.get_world_size()
    else:
        own_rank, size, master, port = _complete(place, rank, world_size, master, port)
    choose_interface(master)

    # 2. The store, and 3. the sign-in of all workers there.
    try:
        if existing:
            store = dist.distributed_c10d._get_default_store()
        elif announced is not None and announced.store.port == port:
            store = announced.store
        else:
            store = open_store(str(master), port, own_rank, hosted=own_rank == 0 and not torchrun_hosts)
            port = store.port
        if size > 1:
            store = sign_in(store, own_rank, size, job)
        if not existing:
            limit = timedelta(seconds=Config.timeout)
            dist.init_process_group(backend, store=store, rank=own_rank, world_size=size, timeout=limit)
    except SarError:
        if own_rank == 0:
            time.sleep(HEARD_SECONDS)  # this process usually hosts the store, where the others look for the error
        raise
    except (RuntimeError, ValueError, OSError) as error:
        why = str(error).rstrip(". ")
        where = "torch.distributed's store" if existing else f"the job's store at {master}:{port}"
        raise CommunicationError(
            f"Worker {own_rank} of {size} could not join the process group over {where}: {why}. Check that worker 0 "
            "runs there, that the port is free, that all workers name the same size, and on several hosts that "
            "SAR_SOCKET_NAME names the interface by which they reach each other."
        ) from error

    # 4. The group, which connects in its first call.
    group = group_of_processes(store, own_rank, size, tensors_on, backend)
    if size > 1 and not shares_process:
        group.replicas = Replicas()
    atexit.register(_shut_down, group, started=not existing)
    with group.guard():
        group.agree("initialize_comms")
    stop_announcing()
    address = (None, None) if existing else (master, port)
    _current = Communication(group, BufferPool(tensors_on), backend, *address)
    logger.info("worker %d of %d is connected over %s", own_rank, size, backend)


def _complete(
    place: Place, rank: int | None, world_size: int | None, master: str | None, port: int
) -> tuple[int, int, str, int]:
    """Rank, number of workers, and worker 0's address and port, if they are not all passed."""
    if (rank, world_size, master, place.launcher) == (None, None, None, None) and not announced_stores:
        logger.info(
            "no launcher and no arguments: a group of one worker (threads: %d); `sar launch --workers W` starts more",
            torch.get_num_threads(),
        )
        rank, world_size = 0, 1
    rank = place.rank if rank is None else rank
    world_size = place.world_size if world_size is None else world_size
    if port == DEFAULT_PORT and master is None and place.port is not None:
        port = place.port
    elif port == DEFAULT_PORT and master is None and world_size == 1:
        master, port = "127.0.0.1", 0  # nobody else needs the port, so jobs of one host need not share the default
    master = master or place.master
    if rank is None or world_size is None or master is None:
        named = {"_rank": rank, "_world_size": world_size, "master_ip_address": master}
        raise ConfigError(
            f"initialize_comms needs {', '.join(name for name, value in named.items() if value is None)}: not given, "
            "and not complete in the environment of torchrun, Slurm or MPI. Pass them (sar.nfs_ip_init finds the "
            "address over a shared file), or use torchrun."
        )
    if not 0 <= rank < world_size:
        raise ConfigError(f"Rank {rank} is not below the world size {world_size}; ranks count from 0.")
    return rank, world_size, master, port


def _choose_device(device: torch.device | str | None, backend: str, local_rank: int | None) -> torch.device:
    """The device of tensors that travel. A CUDA device becomes the current one.

    This is the device asked for, else for nccl the one with the local rank, else the current one. Under Slurm each
    process may see one device only, which has index 0 in all of them.
    """
    asked = torch.device(device or ("cuda" if backend == "nccl" else "cpu"))
    if (asked.type == "cuda") != (backend == "nccl"):
        raise ConfigError(f"Tensors cannot travel on {asked} with backend {backend}; leave _comm_device out.")
    if asked.type != "cuda":
        return asked
    count, number = torch.cuda.device_count(), asked.index
    if number is None and device is None and local_rank is not None:
        number = 0 if count == 1 else local_rank
    if count == 0 or (number is not None and number >= count):
        raise ConfigError(
            f"nccl needs a CUDA device for each worker, but this process sees {count} of them and is to take number "
            f"{number or 0}. Start as many workers on a host as it has GPUs, or take gloo: there workers may share one."
        )
    chosen = torch.device("cuda", torch.cuda.current_device() if number is None else number)
    torch.cuda.set_device(chosen)
    return chosen


def group_of_processes(
    store: dist.Store, rank: int, world_size: int, device: torch.device | None = None, backend: str = "gloo"
) -> Group:
    """A group of worker processes that share a store, this one among them; `device` is by default the CPU."""
    return Group((NcclTransport if backend == "nccl" else GlooTransport)(store, rank, world_size, device))


def group_beside(name: str) -> Group:
    """A second group of the same processes, for another thread: messages of the two never meet.

    All workers pass the same `name`, which no other group of the job has. The group is on the CPU.
    """
    group = current_group()
    store: dist.Store = dist.HashStore()  # enough for one worker, who may have no store of torch
    if group.world_size > 1:
        store = dist.PrefixStore(f"sar/{name}", dist.distributed_c10d._get_default_store())
    beside = Group(GlooTransport(store, group.rank, group.world_size), counted=False)
    _beside.add(beside)
    return beside


def set_current(current: Communication) -> None:
    """Replace this worker's group. Workers of one process do so with their turns."""
    global _current
    _current = current


@contextmanager
def standing_in(group: Group, pool: BufferPool) -> Iterator[None]:
    """Context with another group and its buffers, such as a plan's, which sends nothing."""
    global _current
    before, _current = _current, Communication(group, pool, "none", None, None)
    try:
        yield
    finally:
        _current = before


def is_initialized() -> bool:
    """Whether `initialize_comms` has been called."""
    return _current is not None


def has_peers() -> bool:
    """Whether this worker is connected to others."""
    return _current is not None and _current.group.world_size > 1


def rank() -> int:
    """This worker's rank, from 0."""
    return current().group.rank


def world_size() -> int:
    """The number of workers."""
    return current().group.world_size


def comm_device() -> torch.device:
    """The device of tensors that travel."""
    return current().group.device


def backend() -> str:
    """The backend of `torch.distributed`."""
    return current().backend


def master_ip() -> str | None:
    """The address of worker 0; None if torch's process group existed before sar."""
    return current().master_ip


def master_port() -> int | None:
    """The port of worker 0; None if torch's process group existed before sar."""
    return current().master_port


def current_group() -> Group:
    """This worker's end of the current group."""
    return current().group


def current() -> Communication:
    """This worker's communication; raises NotInitializedError before `initialize_comms`."""
    if _current is None:
        raise NotInitializedError("Communication is not set up; call sar.initialize_comms() first, on every worker.")
    return _current


def _shut_down(group: Group, *, started: bool) -> None:
    """Join gloo's threads before the interpreter shuts down. During the shutdown, the process would sometimes abort."""
    if started and group.rank == 0 and group.world_size > 1 and group.stopped is not None:
        time.sleep(HEARD_SECONDS)  # this process hosts the store, where the others look for the error
    group.close()
    if started and dist.is_initialized():
        dist.destroy_process_group()


def _in_child() -> None:
    """Disable distributed calls in a forked process. All connections belong to its parent."""
    if _current is not None:
        atexit.unregister(_shut_down)
        groups = [_current.group, *_beside]
        for group in groups:
            group.leave_to_parent()
        for kept in (*groups, dist.group.WORLD):  # gloo's destructor would wait for the parent's threads
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


os.register_at_fork(after_in_child=_in_child)


def recover(step: int = 0) -> int:
    """Recover from an error in a distributed call, together with all other workers.

    After such an error every further call raises. All workers must call this, even those that saw no error, and then
    repeat the step that it returns. With one worker it does nothing.

    Args:
        step: the first step that this worker has not finished.

    Returns:
        The least of all workers' `step`: the first one that not all have finished.

    Raises:
        PeerError: if a worker has died or left, which is final, or raised an error meanwhile.
        CommunicationTimeout: if a worker does not call this within five minutes, or `Config.timeout` if less.
    """
    return current_group().recover(step)
