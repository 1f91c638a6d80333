"""How workers come together: a shared file for worker 0's address, the job's store, and the sign-in.

[Note: stale files]
A file left by an earlier run must be detected. So worker 0 starts the job's store, puts a fresh nonce into it, and
writes address, port and nonce to the file. The others trust a file only if a store at that address has the nonce; until
then they read the file again. `initialize_comms` removes nonce and file once all workers are connected, so a run that
has ended or is past its set-up confirms no file. Two runs that start on one file at the same time cannot be told apart:
give each its own.

[Note: one job]
Any process that reaches the port reaches the store, and workers of two jobs on one port would exchange data. So each
worker signs with its rank, world size, job and versions. A worker whose job is not that of worker 0 raises, and leaves
the others alone. A second worker of one rank, or another world size, ends the sign-in for all: whoever completes the
job, or sees a clash, writes the verdict, and the first verdict holds. The job is SAR_JOB_ID, else the nonce of
`nfs_ip_init`, else the launcher's ID; SECURITY.md says which jobs cannot be told apart. Keys begin with "sar", because
other programs use torch's default port, and contain torchrun's restart count, because its agent may keep the store.
"""

import errno
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import torch.distributed as dist

from sar.comm import liveness
from sar.comm.environment import own_address
from sar.comm.store_notes import BoundedStore, SilentStoreError, in_background
from sar.config import Config
from sar.durable import put_in_place
from sar.errors import CommunicationError, CommunicationTimeout, ConfigError
from sar.logging_setup import logger

T = TypeVar("T")

POLL_SECONDS: Final = 0.05
CONNECT_SECONDS: Final = 2.0
RESOLVE_SECONDS: Final = 30.0  # until the name of worker 0's host must be known
COMPARED: Final = ("sar", "torch", "dgl")
COMPLETE: Final = "complete"
_NONCE: Final = "sar/nonce"


def wait_for(look: Callable[[], T | None], rank: int, what: Callable[[], str], seconds: float) -> T:
    """Call `look` until it returns anything but None and raises no OSError. Warns of long waits.

    Raises CommunicationTimeout after `seconds`. `look` itself has to return soon.
    """
    began, report_at, found = time.monotonic(), liveness.STALL_SECONDS, ""
    while True:
        try:
            if (result := look()) is not None:
                return result
            found = ""
        except OSError as error:
            found = f" ({error.strerror or error})"
        waited = time.monotonic() - began
        if waited > seconds:
            raise CommunicationTimeout(
                f"Worker {rank} waited {seconds:g} s (at most Config.timeout) for {what()}{found}. Check that all "
                "workers run, with the same address, port and number of workers."
            )
        if waited >= report_at:
            report_at = 2 * waited
            logger.warning("Worker %d has waited %.0f s for %s%s", rank, waited, what(), found)
        time.sleep(POLL_SECONDS)


def open_store(host: str, port: int, rank: int, *, hosted: bool) -> dist.TCPStore:
    """Host the job's store in this process if `hosted`, else connect to it."""
    wait_for(
        lambda: socket.getaddrinfo(host, None),  # torch would try for minutes, with a warning each time
        rank,
        lambda: f"the address of worker 0's host, {host!r}, which may be set by MASTER_ADDR or in /etc/hosts,",
        min(RESOLVE_SECONDS, Config.timeout),
    )
    if hosted:
        return host_store(host, port)
    silence, where = liveness.SILENCE_SECONDS, f"the job's store at {host}:{port}, where worker 0 runs,"
    return wait_for(lambda: connect_store(host, port, silence), rank, lambda: where, Config.timeout)


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


def connect_store(host: str, port: int, seconds: float) -> dist.TCPStore:
    """Connect to the job's store. Raises OSError if nobody listens, SilentStoreError if it does not answer in time."""
    socket.create_connection((host, port), CONNECT_SECONDS).close()  # torch would try again, with a warning each time
    limit = timedelta(seconds=Config.timeout)
    connecting = in_background(lambda: dist.TCPStore(host, port, wait_for_workers=False, timeout=limit))
    futures.wait([connecting], seconds)
    if not connecting.done():
        raise SilentStoreError
    return connecting.result()


class Signature(NamedTuple):
    """A worker's entry in the sign-in."""

    who: str
    world_size: int
    job: str | None
    versions: dict[str, str]  # versions of the packages of `COMPARED` that are imported
    nonce: str  # tells it from the signature of any other worker


def sign_in(store: dist.Store, rank: int, world_size: int, job: str | None) -> dist.Store:
    """Wait for all workers of this job, and check that they belong together: see [Note: one job].

    `job` is the ID of the job, None if it has none. Returns the job's part of the store.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    table = BoundedStore(dist.PrefixStore(f"sar/joining/{restart}", store), liveness.SILENCE_SECONDS)
    keys = [str(k) for k in range(world_size)]
    named = "a job without SAR_JOB_ID" if job is None else f"job {job}"
    who = f"Worker {rank} of {world_size} of {named} ({socket.gethostname()}, process {os.getpid()})"
    own = json.dumps(Signature(who, world_size, job, imported_versions(), secrets.token_hex(8)))

    if rank == 0:
        table.write_once("0", own)
    signed = wait_for(lambda: table.read(["0"])[0], rank, lambda: "worker 0 to join", Config.timeout)
    first = Signature(*json.loads(signed))
    if first.job != job:
        raise CommunicationError(
            f"{who} has reached the store of {first.who}. Two jobs share the port: use another port for each. If these "
            "are one job, set SAR_JOB_ID to the same on all of its workers."
        )
    present = table.write_once(keys[rank], own) if first.world_size == world_size else signed
    if present != own:
        clash = (
            f"{who} does not go with {Signature(*json.loads(present)).who}: the workers of a job have different ranks, "
            "and name one world size. If two jobs share the port, set another port, or another SAR_JOB_ID, for each."
        )
        table.write_once("verdict", clash)  # does nothing if the job is complete: whoever comes late raises alone
        raise CommunicationError(clash)
    if table.ask(lambda store: store.add("signed", 1)) == world_size:
        table.write_once("verdict", COMPLETE)

    def missing() -> str:
        return f"{', '.join(f'worker {k}' for k in table.absent(keys))} to join"

    verdict = wait_for(lambda: table.read(["verdict"])[0], rank, missing, Config.timeout)
    if verdict != COMPLETE:
        raise CommunicationError(verdict)
    workers = [Signature(*json.loads(str(text))) for text in table.read(keys)]
    for name in COMPARED:
        importers = [worker for worker in workers if name in worker.versions]
        if len({worker.versions[name] for worker in importers}) > 1:
            lines = "\n".join(f"  {worker.who}: {worker.versions[name]}" for worker in importers)
            raise ConfigError(
                f"The workers have different versions of {name}:\n{lines}\nInstall the same version on all hosts."
            )
    return dist.PrefixStore(f"sar/{restart}/{job}", store)


def imported_versions() -> dict[str, str]:
    """Versions of the imported packages, without their local build labels."""
    imported = {name: getattr(sys.modules.get(name), "__version__", None) for name in COMPARED}
    return {name: str(version).partition("+")[0] for name, version in imported.items() if version is not None}


class AnnouncedStore(NamedTuple):
    """The job's store, found by `nfs_ip_init` for `initialize_comms`."""

    address: str
    nonce: str
    store: dist.TCPStore
    file: Path | None  # announces it; None on workers other than 0


announced_stores: Final[list[AnnouncedStore]] = []
"""Results of `nfs_ip_init` in this process, the latest last, until all workers are connected."""


def nfs_ip_init(_rank: int, ip_file: str) -> str:
    """Send worker 0's address to all workers through a file that all of them see.

    Args:
        _rank: this worker.
        ip_file: path of the file; worker 0 replaces it. An old file does no harm: see [Note: stale files].

    Returns:
        The address of worker 0, for `initialize_comms`.

    Raises:
        ConfigError: if worker 0 cannot write the file.
        CommunicationTimeout: if no living worker 0 shows up within `Config.timeout`.
    """
    path = Path(ip_file)
    if _rank == 0:
        stop_announcing()
        address, nonce = own_address(), secrets.token_hex(8)
        store = host_store(address, 0)
        store.set(_NONCE, nonce)
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
            store = connect_store(address, int(port), CONNECT_SECONDS)
            if BoundedStore(store).read([_NONCE]) == [nonce]:
                return AnnouncedStore(address, nonce, store, None)
        return None

    what = f"worker 0 to announce its address in {path}, where an old file does not count"
    announced_stores.append(wait_for(confirmed, _rank, lambda: what, Config.timeout))
    return announced_stores[-1].address


def stop_announcing() -> None:
    """Remove worker 0's nonce and file, once all workers are connected."""
    for announced in announced_stores:
        if announced.file is not None:
            announced.store.delete_key(_NONCE)
            with suppress(OSError):
                if announced.nonce in announced.file.read_text():  # else it is somebody else's by now
                    announced.file.unlink()
    announced_stores.clear()
