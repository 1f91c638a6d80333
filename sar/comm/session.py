"""This worker's group: joining the job, recovery, and accessors such as `rank` and `world_size`."""

import atexit
import ctypes
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist

from sar.comm import liveness
from sar.comm.allocator import set_allocator
from sar.comm.environment import choose_interface, find_place, launcher_variables
from sar.comm.group import Group
from sar.comm.joining import HEARD_SECONDS, connect_store, host_store, meetings, sign_in, stop_announcing, wait_for
from sar.comm.process_transport import GlooTransport, NcclTransport
from sar.comm.replicas import Replicas
from sar.comm.rows import BufferPool
from sar.config import Config
from sar.errors import CommunicationError, ConfigError, NotInitializedError, SarError
from sar.logging_setup import logger, print_errors_briefly

DEFAULT_PORT = 12345
BACKENDS = ("gloo", "nccl", "mpi", "ccl")
RESOLVE_SECONDS: Final = 30.0  # until the name of worker 0's host must be known
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
    given_rank: int | None,
    given_size: int | None,
    given_master: str | None,
    backend: str | None,
    given_device: torch.device | str | None,
    given_port: int,
    *,
    shares_process: bool,
) -> None:
    """Join this process to its job, with the arguments and errors of `sar.initialize_comms`.

    If workers are to share this process, its memory is set up for them, and models are compared by them alone.
    """
    global _current
    print_errors_briefly()  # before torch.distributed starts, which puts the rank before each line
    if backend is not None and backend not in BACKENDS:
        raise ConfigError(f"Unknown backend {backend!r}; expected one of {', '.join(BACKENDS)}.")
    if backend is not None and not dist.is_backend_available(backend):
        raise ConfigError(
            f"This torch has no backend {backend!r}; import the package that brings it first (for ccl "
            "oneccl_bindings_for_pytorch), or take gloo."
        )
    Config.validate()
    wanted = {"rank": given_rank, "world size": given_size, "backend": backend}
    if _current is not None:
        _check_same(wanted, rank(), world_size(), _current.backend)
        return
    set_allocator(spilled=shares_process)
    if os.environ.get("SAR_LAUNCHER") == str(os.getppid()):  # if it is killed, it cannot end its workers
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    master: tuple[str | None, int | None] = (None, None)
    existing = dist.is_initialized()
    if existing:
        choose_interface(given_master)
    else:
        master = _start(given_rank, given_size, given_master, backend or "gloo", given_port)
    own_rank, size, backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    store = dist.distributed_c10d._get_default_store()
    _check_same(wanted, own_rank, size, backend)
    place = find_place()
    if existing and size > 1:
        with _joining(own_rank, size, "torch.distributed's store"):
            sign_in(store, own_rank, size, os.environ.get("SAR_JOB_ID") or place.job)
    device = torch.device(given_device or ("cuda" if backend == "nccl" else "cpu"))
    if (device.type == "cuda") != (backend == "nccl"):
        raise ConfigError(f"Tensors cannot travel on {device} with backend {backend}; leave _comm_device out.")
    if device.type == "cuda":
        device = _take_cuda_device(device, None if given_device else place.local_rank)
    group = group_of_processes(store, own_rank, size, device, backend)
    if size > 1 and not shares_process:
        group.replicas = Replicas()
    atexit.register(_shut_down, group, started=not existing)
    with group.guard():
        group.agree("initialize_comms")
    stop_announcing()
    _current = Communication(group, BufferPool(device), backend, *master)
    logger.info("worker %d of %d is connected over %s", own_rank, size, backend)


def _start(rank: int | None, size: int | None, given_master: str | None, backend: str, port: int) -> tuple[str, int]:
    """Start torch's process group from the arguments or the launcher; return worker 0's address and port."""
    place, variables = find_place(), launcher_variables()
    met = meetings[-1] if meetings else None
    store, master, job = None, given_master or place.master, os.environ.get("SAR_JOB_ID")
    of_launcher = place.job if rank is None or place.launcher == "torchrun" else None
    if met is None and not variables and (rank, size, master) == (None, None, None):
        logger.info(
            "no launcher and no arguments: a group of one worker (threads: %d); `sar launch --workers W` starts more",
            torch.get_num_threads(),
        )
        rank, size = 0, 1
    rank, size = place.rank if rank is None else rank, place.world_size if size is None else size
    if met is not None and met.address == given_master:
        job = job or met.nonce
        if port == DEFAULT_PORT:
            port, store = met.port, met.store
    elif port == DEFAULT_PORT and given_master is None:
        if place.port is not None:
            port = place.port
        elif size == 1:
            master, port = "127.0.0.1", 0  # nobody else needs the port, so jobs of one host need not share the default
    job = job or of_launcher
    if rank is None or size is None or master is None:
        named = {"_rank": rank, "_world_size": size, "master_ip_address": master}
        missing = [name for name, value in named.items() if value is None]
        where = f", of which only {', '.join(variables)} is set" if variables else ""
        raise ConfigError(
            f"initialize_comms needs {', '.join(missing)}: not given, and not found in the environment of torchrun, "
            f"Slurm or MPI{where}. Pass them (sar.nfs_ip_init finds the address over a shared file), or use torchrun."
        )
    if not 0 <= rank < size:
        raise ConfigError(f"Rank {rank} is not below the world size {size}; ranks count from 0.")
    choose_interface(master)
    torchrun_hosts = given_master is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, who = master, f"Worker {rank}"
    with _joining(rank, size, f"the job's store at {master}:{port}"):
        if store is None:
            wait_for(
                lambda: socket.getaddrinfo(host, None),  # torch would try for minutes, with a warning each time
                who,
                lambda: f"the address of worker 0's host, {host!r},",
                "Name an address (MASTER_ADDR, or master_ip_address), or add the name to DNS or /etc/hosts.",
                min(RESOLVE_SECONDS, Config.timeout),
            )
            if rank == 0 and not torchrun_hosts:
                store = host_store(host, port)
                port = store.port
            else:
                store = wait_for(
                    lambda: connect_store(host, port, liveness.SILENCE_SECONDS),
                    who,
                    lambda: f"the job's store at {host}:{port}",
                    "Check that worker 0 runs there.",
                    Config.timeout,
                )
        store = sign_in(store, rank, size, job)
        limit = timedelta(seconds=Config.timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    return master, port


@contextmanager
def _joining(rank: int, size: int, store: str) -> Iterator[None]:
    """Context that turns errors of a store into errors that name it and suggest checks."""
    try:
        yield
    except SarError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        why = str(error).rstrip(". ")
        raise CommunicationError(
            f"Worker {rank} of {size} could not join the process group over {store}: {why}. "
            "Check that worker 0 runs there, that the port is free, that all workers name the same size, and on "
            "several hosts that SAR_SOCKET_NAME names the interface by which they reach each other."
        ) from error


def _check_same(asked: dict[str, int | str | None], *existing: int | str) -> None:
    for (what, wanted), present in zip(asked.items(), existing, strict=True):
        if wanted is not None and wanted != present:
            raise ConfigError(
                f"initialize_comms asks for {what} {wanted}, but the existing process group has {present}."
            )


def _take_cuda_device(asked: torch.device, local_rank: int | None) -> torch.device:
    """Make a CUDA device current: the index asked for, else the local rank, else the current device.

    Under Slurm each process may see one device only, which has index 0 in all of them.
    """
    count = torch.cuda.device_count()
    number = asked.index if asked.index is not None else local_rank
    if number is not None and asked.index is None and count == 1:
        number = 0
    if count == 0 or (number is not None and number >= count):
        raise ConfigError(
            f"nccl needs a CUDA device for each worker, but this process sees {count} of them and is to take number "
            f"{number or 0}. Start as many workers on a host as it has GPUs, or take gloo: there workers may share one."
        )
    device = torch.device("cuda", torch.cuda.current_device() if number is None else number)
    torch.cuda.set_device(device)
    return device


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
