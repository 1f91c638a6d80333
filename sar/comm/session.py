"""Setting up this worker's communication, and asking about it."""

import atexit
import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from sar.comm.allocator import set_allocator
from sar.comm.environment import choose_interface, end_with_launcher, find_place, job_id, local_rank, set_in_part
from sar.comm.group import Group
from sar.comm.joining import Pulse, await_name, check_in, host_store, open_store, while_it_answers
from sar.comm.process_transport import GlooTransport, NcclTransport
from sar.comm.rendezvous import meeting, stop_announcing
from sar.comm.replicas import Replicas
from sar.comm.rows import BufferPool
from sar.config import Config
from sar.errors import CommunicationError, ConfigError, NotInitializedError, SarError
from sar.logging_setup import logger

DEFAULT_PORT = 12345
BACKENDS = ("gloo", "nccl", "mpi", "ccl")


class Communication(NamedTuple):
    """This worker's end of the group, and what it was made of."""

    group: Group
    pool: BufferPool  # of this worker's exchanges
    backend: str
    master_ip: str | None
    master_port: int | None


_current: Communication | None = None


def _no_others() -> None:
    """No other workers in this process."""


workers_of_process: Callable[[], Callable[[], None] | None] = _no_others
"""What says whether the environment asks for several workers in this process, and then how to start them."""


def initialize_comms(
    _rank: int | None = None,
    _world_size: int | None = None,
    master_ip_address: str | None = None,
    backend: str | None = None,
    _comm_device: torch.device | str | None = None,
    master_port_number: int = DEFAULT_PORT,
) -> None:
    """Connect this worker to all others; uses the process group of `torch.distributed` if there is one already.

    Under torchrun, Slurm or MPI everything can be left out. Without a launcher and without arguments, this worker is
    the only one; all partitions of a directory are its own. The network interface is taken from the environment
    variable SAR_SOCKET_NAME where it is set. glibc's allocator is set as `Config.allocator` says. A second call does
    nothing but check that it asks for the same.

    Args:
        _rank: this worker, 0 to `_world_size` - 1.
        _world_size: number of workers, which is the number of partitions.
        master_ip_address: address or host name of worker 0.
        backend: `gloo` (default), or `nccl` for CUDA devices (untested with more than one worker); `mpi` and `ccl` are
            passed to `torch.distributed` (untested), and sar itself then talks over gloo.
        _comm_device: device on which tensors travel; default the CPU, with nccl a CUDA device for each process,
            by the launcher's local rank. It becomes the current one, so that "cuda" means it from then on.
        master_port_number: TCP port of worker 0; the one that `nfs_ip_init` has announced, or a launcher's MASTER_PORT,
            goes before the default.

    Raises:
        ConfigError: where arguments are missing or contradict each other or the existing process group, or the workers
            have different versions of sar, torch or DGL.
        CommunicationError: where the workers cannot be reached within `Config.timeout`, or what is reached is another
            job: see [Note: one job].
    """
    global _current
    if backend is not None and backend not in BACKENDS:
        raise ConfigError(f"Unknown backend {backend!r}; expected one of {', '.join(BACKENDS)}.")
    if backend is not None and not dist.is_backend_available(backend):
        raise ConfigError(
            f"This torch has no backend {backend!r}; import the package that brings it first (for ccl "
            "oneccl_bindings_for_pytorch), or take gloo."
        )
    Config.validate()
    asked: dict[str, int | str | None] = {"rank": _rank, "world size": _world_size, "backend": backend}
    if _current is not None:
        _check_same(asked, rank(), world_size(), _current.backend)
        return
    start_workers = workers_of_process()
    set_allocator(spilled=start_workers is not None)
    end_with_launcher()
    choose_interface(master_ip_address)
    master: tuple[str | None, int | None] = (None, None)
    found = dist.is_initialized()
    if not found:
        master = _start(_rank, _world_size, master_ip_address, backend or "gloo", master_port_number)
    place, backend = (dist.get_rank(), dist.get_world_size()), dist.get_backend()
    _check_same(asked, *place, backend)
    device = torch.device(_comm_device or ("cuda" if backend == "nccl" else "cpu"))
    if (device.type == "cuda") != (backend == "nccl"):
        raise ConfigError(f"Tensors cannot travel on {device} with backend {backend}; leave _comm_device out.")
    if device.type == "cuda":
        device = _take_cuda_device(device, None if _comm_device else local_rank())
    store = dist.distributed_c10d._get_default_store()
    if found and dist.get_world_size() > 1:
        job = os.environ.get("SAR_JOB_ID") or job_id()
        while_it_answers(lambda pulse: check_in(store, *place, job, pulse), place[0], "torch.distributed's store")
    group = group_of_processes(store, *place, device, backend)
    if group.world_size > 1 and start_workers is None:
        group.replicas = Replicas()
    with group.guard():
        group.agree("initialize_comms")
    stop_announcing()
    _current = Communication(group, BufferPool(device), backend, *master)
    atexit.register(_shut_down, started=master[0] is not None)
    logger.info("worker %d of %d is connected over %s", group.rank, group.world_size, backend)
    if start_workers is not None:
        start_workers()


def _take_cuda_device(asked: torch.device, local_rank: int | None) -> torch.device:
    """Make a CUDA device the current one: that asked for by number, else the launcher's choice, else what is current.

    Slurm may let each process see one device only, which is number 0 in all of them.
    """
    there = torch.cuda.device_count()
    number = asked.index if asked.index is not None else local_rank
    if number is not None and asked.index is None and there == 1:
        number = 0
    if there == 0 or (number is not None and number >= there):
        raise ConfigError(
            f"nccl needs a CUDA device for each worker, but this process sees {there} of them and is to take number "
            f"{number or 0}. Start as many workers on a host as it has GPUs, or take gloo: there workers may share one."
        )
    device = torch.device("cuda", torch.cuda.current_device() if number is None else number)
    torch.cuda.set_device(device)
    return device


def group_of_processes(
    store: dist.Store, rank: int, world_size: int, device: torch.device | None = None, backend: str = "gloo"
) -> Group:
    """A group of worker processes that share a store, one of which this is; `device` is by default the CPU."""
    return Group((NcclTransport if backend == "nccl" else GlooTransport)(store, rank, world_size, device))


def set_current(current: Communication) -> None:
    """Give this worker another group, as workers of one process have their own in turns."""
    global _current
    _current = current


@contextmanager
def standing_in(group: Group, pool: BufferPool) -> Iterator[None]:
    """Take another group and its buffers for this worker's own inside, as a plan does that sends nothing."""
    global _current
    before, _current = _current, Communication(group, pool, "none", None, None)
    try:
        yield
    finally:
        _current = before


def is_initialized() -> bool:
    """Whether `initialize_comms` has been called."""
    return _current is not None


def rank() -> int:
    """This worker's number."""
    return current().group.rank


def world_size() -> int:
    """The number of workers."""
    return current().group.world_size


def comm_device() -> torch.device:
    """The device on which tensors travel."""
    return current().group.device


def backend() -> str:
    """The backend of `torch.distributed`."""
    return current().backend


def master_ip() -> str | None:
    """The address of worker 0; None where the process group was there before sar."""
    return current().master_ip


def master_port() -> int | None:
    """The port of worker 0; None where the process group was there before sar."""
    return current().master_port


def current_group() -> Group:
    """This worker's end of the current group."""
    return current().group


def current() -> Communication:
    """What `initialize_comms` has set up; raises NotInitializedError before that."""
    if _current is None:
        raise NotInitializedError("Communication is not set up; call sar.initialize_comms() first, on every worker.")
    return _current


def _shut_down(started: bool) -> None:
    """Join gloo's threads while the interpreter is whole; left to its end, the process now and then aborts."""
    if _current is not None:
        _current.group.close()
    if started and dist.is_initialized():
        dist.destroy_process_group()


def _in_child() -> None:
    """Leave all connections to the parent of a process that was forked."""
    if _current is not None:
        atexit.unregister(_shut_down)
        _current.group.leave_to_parent()
        for group in (_current.group, dist.group.WORLD):  # gloo's destructor would wait for the parent's threads
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_in_child)


def _start(
    given_rank: int | None, given_size: int | None, given_master: str | None, backend: str, given_port: int
) -> tuple[str, int]:
    place, met = find_place(), meeting()
    rank = given_rank if given_rank is not None else place.rank if place else None
    size = given_size if given_size is not None else place.world_size if place else None
    master = given_master or (place.master if place else None)
    store: dist.Store | None
    port, store, job = given_port, None, os.environ.get("SAR_JOB_ID")
    half_set = set_in_part()
    if place is None and met is None and (rank, size, master) == (None, None, None) and not half_set:
        logger.info(
            "no launcher and no arguments: a group of one worker (threads: %d); `sar launch --workers W` starts more",
            torch.get_num_threads(),
        )
        rank, size = 0, 1
    unnamed = given_master is None and given_port == DEFAULT_PORT and (place is None or place.port is None)
    if size == 1 and unnamed:
        master = "127.0.0.1"
    if rank is None or size is None or master is None:
        given = {"_rank": rank, "_world_size": size, "master_ip_address": master}
        missing = [name for name, value in given.items() if value is None]
        where = f", of which only {', '.join(half_set)} is set" if half_set else ""
        raise ConfigError(
            f"initialize_comms needs {', '.join(missing)}: not given, and not found in the environment of torchrun, "
            f"Slurm or MPI{where}. Pass them (sar.nfs_ip_init finds the address over a shared file), or use torchrun."
        )
    if not 0 <= rank < size:
        raise ConfigError(f"Rank {rank} is not below the world size {size}; ranks count from 0.")
    if size == 1 and unnamed:  # nobody has to find the port, so the jobs of a host need not share the default
        own = host_store(master, 0)
        store, port = own, own.port
    elif met is not None and met.address == given_master:
        job = job or met.nonce
        if given_port == DEFAULT_PORT:
            port, store = met.port, met.store
    elif given_port == DEFAULT_PORT and given_master is None and place is not None and place.port is not None:
        port = place.port
    if given_rank is None or (place is not None and place.launcher == "torchrun"):
        job = job or job_id()
    choose_interface(master)
    # torchrun's agent hosts the store itself.
    agent = given_master is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def join(pulse: Pulse) -> dist.Store:
        found = store
        if found is None:
            await_name(master)
            found = open_store(master, port, pulse) if rank or agent else host_store(master, port)
        return check_in(found, rank, size, job, pulse)

    try:
        joined = while_it_answers(join, rank, f"the job's store at {master}:{port}")
        limit = timedelta(seconds=Config.timeout)
        dist.init_process_group(backend, store=joined, rank=rank, world_size=size, timeout=limit)
    except SarError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        why = str(error).rstrip(". ")
        raise CommunicationError(
            f"Worker {rank} of {size} could not join the process group at {master}:{port}: {why}. "
            "Check that worker 0 runs there, that the port is free, that all workers name the same size, and on "
            "several hosts that SAR_SOCKET_NAME names the interface by which they reach each other."
        ) from error
    return master, port


def _check_same(asked: dict[str, int | str | None], *found: int | str) -> None:
    for (what, wanted), there in zip(asked.items(), found, strict=True):
        if wanted is not None and wanted != there:
            raise ConfigError(f"initialize_comms asks for {what} {wanted}, but the existing process group has {there}.")


def recover(step: int = 0) -> int:
    """Go on after an error in a distributed call, together with all other workers.

    After such an error every further call raises. All workers call this instead, those that saw no error included, and
    are then at the same call: they repeat the step that is returned. With one worker there is nothing to do.

    Args:
        step: the first step that this worker has not finished.

    Returns:
        The least of all workers' `step`: the first one that not all have finished.

    Raises:
        PeerError: where a worker has died or left, which is final, or raised an error meanwhile.
        CommunicationTimeout: where a worker does not call this within five minutes, or `Config.timeout` if less.
    """
    return current_group().recover(step)
