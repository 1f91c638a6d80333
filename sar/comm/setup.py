"""Set-up of a job: `connect`, in the order of its steps, and `nfs_ip_init`, which precedes it.

[Note: stale files]
A file left by an earlier run must be detected. So worker 0 starts the job's store, puts a fresh nonce into it, and
writes address, port and nonce to the file. The others trust a file only if a store at that address has the nonce; until
then they read the file again. `initialize_comms` removes nonce and file once all workers are connected, so a run that
has ended or is past its set-up confirms no file. Two runs that start on one file at the same time cannot be told apart;
use one file per run.

[Note: one job]
Any process that reaches the port reaches the store, and workers of two jobs on one port would exchange data. So the
keys of a job contain its ID: SAR_JOB_ID, else the nonce of `nfs_ip_init`, else the launcher's ID. SECURITY.md says
which jobs cannot be told apart. Workers of a job that name different numbers of workers, or one rank twice, notice it
when they connect (`process_transport.py`). The group's first agreement compares backends and versions. Keys begin with
"sar", because other programs use torch's default port, and contain torchrun's restart count, because its agent may keep
the store.
"""

import atexit
import ctypes
import errno
import importlib.metadata
import os
import secrets
import signal
import socket
import sys
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist

from sar.comm import session
from sar.comm.allocator import set_allocator
from sar.comm.environment import Place, choose_device, choose_interface, find_place, own_address
from sar.comm.group import Group
from sar.comm.process_transport import ProcessTransport
from sar.comm.replicas import Replicas
from sar.comm.session import Job
from sar.comm.store import bounded, poll
from sar.config import Config
from sar.errors import CommunicationError, ConfigError
from sar.host.durable import put_in_place
from sar.logging_setup import logger, print_errors_briefly

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DEFAULT_PORT = 12345
BACKENDS = ("gloo", "nccl", "mpi", "ccl")
RESOLVE_SECONDS: Final = 30.0  # until the name of worker 0's host must be known
CONNECT_SECONDS: Final = 2.0
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def connect(
    rank: int | None,
    world_size: int | None,
    master: str | None,
    backend: str | None,
    device: torch.device | str | None,
    port: int,
    *,
    within: "dist.ProcessGroup | DeviceMesh | None",
    shares_process: bool,
) -> None:
    """Join this process to its job, with the arguments and errors of `sar.initialize_comms`.

    `within` is its `group`. If workers are to share this process, its memory is configured for them, and only
    they compare models.
    """
    print_errors_briefly()  # before torch.distributed starts, which puts the rank before each line
    Config.validate()
    if backend is not None and (backend not in BACKENDS or not dist.is_backend_available(backend)):
        raise ConfigError(
            f"This torch has no backend {backend!r}; expected one of {', '.join(BACKENDS)}. For ccl, import its "
            "package first, oneccl_bindings_for_pytorch."
        )
    existing, connected = dist.is_initialized(), session.is_initialized()
    processes = dist.group.WORLD if within is None else _group_of_torch(within)
    present: tuple[int | str, ...] = ()
    if connected:
        present = session.rank(), session.world_size(), session.backend()
        if within is not None and processes is not session.job().processes:
            raise ConfigError("initialize_comms asks for another process group than the call before; it cannot change.")
    elif existing:
        present = dist.get_rank(processes), dist.get_world_size(processes), dist.get_backend(processes)
    named = ("rank", "world size", "backend")
    for what, asked, there in zip(named, (rank, world_size, backend), present, strict=False):
        if asked not in (None, there):
            raise ConfigError(f"initialize_comms asks for {what} {asked}, but the existing process group has {there}.")
    if connected:
        return
    set_allocator(spilled=shares_process)
    if os.environ.get("SAR_LAUNCHER") == str(os.getppid()):  # if it is killed, it cannot end its workers
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    # 1. The place in the job: arguments, else the results of `nfs_ip_init`, else the launcher's variables.
    place, backend = find_place(), dist.get_backend(processes) if existing else backend or "gloo"
    tensors_on = choose_device(device, backend, place.local_rank)
    announced = next((store for store in reversed(announced_stores) if store.address == master), None)
    job = os.environ.get("SAR_JOB_ID") or (announced and announced.nonce)
    if job is None and (rank is None or place.launcher == "torchrun" or existing):
        job = place.job

    # 2. The job's part of the store.
    if processes is not None:  # its part of torch's store differs from those of other groups
        own_rank, size = dist.get_rank(processes), dist.get_world_size(processes)
        store = dist.distributed_c10d._world.pg_map[processes][1]
    else:
        torchrun_hosts = master is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        own_rank, size, master, port = _complete(place, rank, world_size, master, port)
        if announced is None:
            store = open_store(master, port, own_rank, hosted=own_rank == 0 and not torchrun_hosts)
        else:
            store = announced.store
        port = store.port
    store = dist.PrefixStore(f"sar/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{job}", store)

    # 3. The group, which connects in its first call, and torch's process group.
    choose_interface(master)
    group = Group(ProcessTransport(store, own_rank, size, tensors_on))
    if size > 1 and not shares_process:
        group.replicas = Replicas()
    atexit.register(session.shut_down, group, started=not existing)
    with group.guard():
        group.agree(f"initialize_comms over {backend}{', SAR_RESIDENT' if shares_process else ''}, with {versions()}")
        if not existing:
            limit = timedelta(seconds=Config.timeout)
            dist.init_process_group(backend, store=store, rank=own_rank, world_size=size, timeout=limit)
    stop_announcing()
    joined = Job(backend, processes=processes or dist.group.WORLD, store=store)
    session.set_current(group, joined if existing else joined._replace(master_ip=master, master_port=port))
    logger.info("worker %d of %d is connected over %s", own_rank, size, backend)


def _group_of_torch(given: Any) -> Any:
    """The process group that `initialize_comms` got, as such or as a `DeviceMesh` with one dimension."""
    group = given
    if hasattr(given, "get_coordinate"):  # a mesh
        if given.ndim != 1:
            raise ConfigError(
                f"initialize_comms got a DeviceMesh with dimensions {given.mesh_dim_names or given.ndim}; expected the "
                'one whose processes share a graph, such as group=mesh["graph"].'
            )
        group = None if given.get_coordinate() is None else given.get_group()
    if not any(known is group for known in dist.distributed_c10d._world.pg_map):
        raise ConfigError(
            f"initialize_comms got group={given!r}; expected a process group of torch.distributed that this process is "
            "in. Every process makes all groups, by init_device_mesh or dist.new_group, and passes its own one."
        )
    return group


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


def versions() -> str:
    """Versions of sar, torch and DGL, without local build labels."""
    found = {"sar": vars(sys.modules["sar"])["__version__"], "torch": torch.__version__}
    with suppress(PackageNotFoundError):
        found["dgl"] = importlib.metadata.version("dgl")
    return ", ".join(f"{name} {number.partition('+')[0]}" for name, number in found.items())


def open_store(host: str, port: int, rank: int, *, hosted: bool) -> dist.TCPStore:
    """Host the job's store in this process if `hosted`, else connect to it."""
    poll(
        lambda: socket.getaddrinfo(host, None),  # torch would try for minutes, with a warning each time
        rank,
        lambda: f"the address of worker 0's host, {host!r}, which may be set by MASTER_ADDR or in /etc/hosts,",
        min(RESOLVE_SECONDS, Config.timeout),
    )
    where = f"the job's store at {host}:{port}"
    try:
        if hosted:
            return host_store(host, port)
        what = f"{where}, where worker 0 runs,"
        return poll(lambda: connect_store(host, port), rank, lambda: what, Config.timeout)
    except CommunicationError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        raise CommunicationError(
            f"Worker {rank} could not join the process group over {where}: {str(error).rstrip('. ')}. Check that "
            "worker 0 runs there, that the port is free, and on several hosts that SAR_SOCKET_NAME names the interface "
            "by which they reach each other."
        ) from error


def host_store(host: str, port: int) -> dist.TCPStore:
    """Start the job's store in this process. Port 0 selects a free port.

    If `host` is an address of this host or "localhost", the store listens on that address only. Otherwise it listens on
    all, because other hosts may resolve a name to another address.
    """
    try:
        numeric = "127.0.0.1" if host == "localhost" else host
        [(family, *_, address), *_] = socket.getaddrinfo(numeric, port, flags=socket.AI_NUMERICHOST)
        listener = socket.create_server(address[:2], family=family)
    except OSError as error:
        if error.errno not in (socket.EAI_NONAME, errno.EADDRNOTAVAIL):
            raise
        logger.info("listening on all interfaces, because %s is no address of this host", host)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    limit, port, descriptor = timedelta(seconds=Config.timeout), listener.getsockname()[1], listener.detach()
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=descriptor)


def connect_store(host: str, port: int) -> dist.TCPStore:
    """Connect to the job's store. Raises OSError if nobody listens or answers."""
    socket.create_connection((host, port), CONNECT_SECONDS).close()  # torch would try again, with a warning each time
    limit = timedelta(seconds=Config.timeout)
    return bounded(lambda: dist.TCPStore(host, port, wait_for_workers=False, timeout=limit), CONNECT_SECONDS)


class AnnouncedStore(NamedTuple):
    """The job's store, found by `nfs_ip_init` for `initialize_comms`."""

    address: str
    nonce: str
    store: dist.TCPStore
    file: Path | None  # announces it; None on workers other than 0


announced_stores: Final[list[AnnouncedStore]] = []
"""Results of `nfs_ip_init` in this process, the latest last, until all workers are connected."""


def nfs_ip_init(_rank: int, ip_file: str) -> str:
    """Send worker 0's address to all workers through a file on shared storage.

    Args:
        _rank: rank of this worker.
        ip_file: path of the file; worker 0 replaces it. Old files are safe: see [Note: stale files].

    Returns:
        The address of worker 0, for `initialize_comms`.

    Raises:
        ConfigError: worker 0 cannot write the file.
        CommunicationTimeout: no live worker 0 is found within `Config.timeout`.
    """
    path = Path(ip_file)
    if _rank == 0:
        stop_announcing()
        address, nonce = own_address(), secrets.token_hex(8)
        store = host_store(address, 0)
        store.set("sar/nonce", nonce)
        draft = path.parent / f"{nonce}.tmp"
        try:
            draft.write_text(f"{address} {store.port} {nonce}\n")
            put_in_place(draft, path)
        except OSError as error:
            with suppress(OSError):
                draft.unlink()
            raise ConfigError(f"Worker 0 cannot write its address to {path}: {error}") from error
        announced_stores.append(AnnouncedStore(address, nonce, store, path))
        return address

    def confirmed() -> AnnouncedStore | None:
        with suppress(RuntimeError, OverflowError, ValueError):  # an incomplete file, a service of another kind, ...
            address, port, nonce = path.read_text().split()
            store = connect_store(address, int(port))
            if bounded(lambda: store.check(["sar/nonce"]) and store.get("sar/nonce").decode() == nonce):
                return AnnouncedStore(address, nonce, store, None)
        return None

    what = f"worker 0 to announce its address in {path}, where an old file does not count"
    announced_stores.append(poll(confirmed, _rank, lambda: what, Config.timeout))
    return announced_stores[-1].address


def stop_announcing() -> None:
    """Remove worker 0's nonce and file, once all workers are connected."""
    for announced in announced_stores:
        if announced.file is not None:
            announced.store.delete_key("sar/nonce")
            with suppress(OSError):
                if announced.nonce in announced.file.read_text():  # otherwise another run has replaced it
                    announced.file.unlink()
    announced_stores.clear()
