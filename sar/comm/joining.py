"""Rendezvous of the workers: a shared file for worker 0's address, the job's store, and the sign-in.

[Note: stale files]
A file left by an earlier run must be detected. So worker 0 starts the job's store, puts a fresh nonce into it, and
writes address, port and nonce to the file. The others trust a file only if a store at that address has the nonce; until
then they read the file again. `initialize_comms` removes nonce and file once all workers are connected, so a run that
has ended or is past its set-up confirms no file. Two runs that start on one file at the same time cannot be told apart:
give each its own.

[Note: one job]
Any process that reaches the port reaches the store, and workers of two jobs on one port would exchange data. So each
worker signs with its rank, world size, job and versions. A worker whose job is not that of worker 0 raises, and leaves
the others alone. A second worker of one rank, or another world size, ends the sign-in for all: the first worker that
sees all signatures, or a clash, writes the verdict, and all follow it. The job is SAR_JOB_ID, else the nonce of
`nfs_ip_init`, else the launcher's ID; SECURITY.md says which jobs cannot be told apart. Keys begin with "sar", because
other programs use torch's default port, and contain torchrun's restart count, because its agent may keep the store.
"""

import errno
import ipaddress
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
from sar.durable import written_whole
from sar.errors import CommunicationError, CommunicationTimeout, ConfigError, SarError
from sar.logging_setup import logger

T = TypeVar("T")

POLL_SECONDS: Final = 0.05
CONNECT_SECONDS: Final = 2.0
HEARD_SECONDS: Final = 3.0  # delay of an error in worker 0, which usually hosts the store, so that others can read it
COMPARED: Final = ("sar", "torch", "dgl")
FROZEN: Final = ": the process that hosts it, usually worker 0, is frozen, or its host has vanished."
COMPLETE: Final = "complete"
_NONCE: Final = "sar/nonce"


class Signature(NamedTuple):
    """A worker's entry in the sign-in."""

    rank: int
    world_size: int
    job: str | None
    where: str
    versions: dict[str, str]  # versions of the packages of `COMPARED` that are imported
    nonce: str  # tells it from the signature of any other worker

    def __str__(self) -> str:
        job = "a job without SAR_JOB_ID" if self.job is None else f"job {self.job}"
        return f"Worker {self.rank} of {self.world_size} of {job} ({self.where})"


def wait_for(look: Callable[[], T | None], who: str, what: Callable[[], str], hint: str, seconds: float) -> T:
    """Call `look` until it returns anything but None and raises no OSError. Warns of long waits.

    Raises CommunicationTimeout after `seconds`, or if the store does not answer for `liveness.SILENCE_SECONDS`.
    """
    began, silence, found, report_at = time.monotonic(), 0.0, "", liveness.STALL_SECONDS
    while True:
        try:
            if (result := look()) is not None:
                return result
            silence, found = 0.0, ""
        except SarError:  # some of which are OSErrors
            raise
        except SilentStoreError:
            silence += POLL_SECONDS  # counts rounds, not time, because this process may have been stopped itself
            if silence > liveness.SILENCE_SECONDS:
                raise CommunicationTimeout(
                    f"{who} has not heard of the job's store for {silence:.0f} s{FROZEN}"
                ) from None
        except OSError as error:
            found = f" ({error.strerror or error})"
        waited = time.monotonic() - began
        if waited > seconds:
            raise CommunicationTimeout(
                f"{who} waited {seconds:g} s (at most Config.timeout) for {what()}{found}. {hint}"
            )
        if waited >= report_at:
            report_at = 2 * waited
            logger.warning("%s has waited %.0f s for %s%s", who, waited, what(), found)
        time.sleep(POLL_SECONDS)


def connect_store(host: str, port: int, seconds: float) -> dist.Store:
    """Connect to another process's store. Raises OSError if nobody listens, CommunicationTimeout if it is frozen."""
    socket.create_connection((host, port), CONNECT_SECONDS).close()  # torch would try again, with a warning each time
    limit = timedelta(seconds=Config.timeout)
    connecting = in_background(
        lambda: dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    )
    futures.wait([connecting], seconds)
    if not connecting.done():
        raise CommunicationTimeout(
            f"The job's store at {host}:{port} has not answered for {seconds:g} s{FROZEN} If another program uses the "
            "port, as worker 0 then says, choose another one."
        )
    return connecting.result()


def host_store(host: str, port: int) -> dist.TCPStore:
    """Start the job's store in this process. Port 0 selects a free port.

    If `host` is an address or "localhost", the store listens on that address only. Otherwise it listens on all, because
    other hosts may resolve a name to another address.
    """
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        listener = socket.create_server((str(address), port), family=family)
    except (ValueError, OSError) as error:
        if isinstance(error, OSError):
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            logger.warning("%s is no address of this host; listening on all", host)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    limit, port, descriptor = timedelta(seconds=Config.timeout), listener.getsockname()[1], listener.detach()
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=descriptor)


def sign_in(store: dist.Store, rank: int, world_size: int, job: str | None) -> dist.Store:
    """Wait for all workers of this job, and check that they belong together: see [Note: one job].

    `job` is the ID of the job, None if it has none. Returns the job's part of the store.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    table = BoundedStore(dist.PrefixStore(f"sar/joining/{restart}", store))
    where = f"{socket.gethostname()}, process {os.getpid()}"
    own = Signature(rank, world_size, job, where, imported_versions(), secrets.token_hex(8))
    keys = [str(k) for k in range(world_size)]

    def meet() -> list[Signature] | None:
        """The signatures of all workers; None if some are missing. Each step may be repeated."""
        if rank == 0:
            table.write_once("0", json.dumps(own))
        first, verdict = table.read(["0", "verdict"])
        if first is None:
            return None
        worker_0, clash = Signature(*json.loads(first)), None
        if worker_0.job != job:
            raise CommunicationError(
                f"{own} has reached the store of {worker_0}. Two jobs share the port: use another port for each. If "
                "these are one job, set SAR_JOB_ID to the same on all of its workers."
            )
        if worker_0.world_size != world_size:
            clash = f"{worker_0} and {own} name different world sizes; name the same."
        elif (before := Signature(*json.loads(table.write_once(keys[rank], json.dumps(own))))) != own:
            clash = (
                f"{own} comes after {before}. Two workers have one rank, or two jobs share the port: set another port, "
                "or another SAR_JOB_ID, for each."
            )
        if clash is not None:
            table.write_once("verdict", clash)  # does nothing if the job is complete: whoever comes late raises alone
            raise CommunicationError(clash)
        if verdict is None and table.ask(lambda store: store.check(keys)):
            verdict = table.write_once("verdict", COMPLETE)
        if verdict is None:
            return None
        if verdict != COMPLETE:
            raise CommunicationError(verdict)
        return [Signature(*json.loads(text)) for text in table.read(keys) if text is not None]

    def missing() -> str:
        with suppress(SilentStoreError):
            return f"{', '.join(f'worker {k}' for k in table.absent(keys))} to join"
        return "the other workers to join"

    try:
        workers = wait_for(
            meet, str(own), missing, "Check that all run, with the same address and port.", Config.timeout
        )
        for name in COMPARED:
            importers = [worker for worker in workers if name in worker.versions]
            if len({worker.versions[name] for worker in importers}) > 1:
                lines = "\n".join(f"  worker {each.rank} ({each.where}): {each.versions[name]}" for each in importers)
                raise ConfigError(
                    f"The workers have different versions of {name}:\n{lines}\nInstall the same version on all hosts."
                )
    except SarError:
        if rank == 0:
            time.sleep(HEARD_SECONDS)
        raise
    return dist.PrefixStore(f"sar/{restart}/{job}", store)


def imported_versions() -> dict[str, str]:
    """Versions of the imported packages, without their local build labels."""
    imported = {name: getattr(sys.modules.get(name), "__version__", None) for name in COMPARED}
    return {name: str(version).partition("+")[0] for name, version in imported.items() if version is not None}


class Meeting(NamedTuple):
    """The job's store, found by `nfs_ip_init` for `initialize_comms`."""

    address: str
    port: int
    nonce: str
    store: dist.Store
    file: Path | None  # announces it; None on workers other than 0


meetings: Final[list[Meeting]] = []
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
    path, found = Path(ip_file), ""
    if _rank == 0:
        stop_announcing()
        address, nonce = own_address(), secrets.token_hex(8)
        store = host_store(address, 0)
        store.set(_NONCE, nonce)
        try:
            with written_whole(path) as file:
                file.write(f"{address} {store.port} {nonce}\n".encode())
                os.chmod(file.fileno(), 0o644)
        except OSError as error:
            raise ConfigError(f"Worker 0 cannot write its address to {path}: {error}") from error
        meetings.append(Meeting(address, store.port, nonce, store, path))
        return address

    def confirmed() -> Meeting | None:
        nonlocal found
        with suppress(OSError, RuntimeError, OverflowError, ValueError):  # no file, a service of another kind, ...
            found = "no file"
            text = path.read_text()
            found = f"an old file: no worker 0 at {text[:60].strip()!r} confirms it"
            address, port, nonce = text.split()
            store = connect_store(address, int(port), CONNECT_SECONDS)
            if BoundedStore(store).read([_NONCE]) == [nonce]:
                return Meeting(address, int(port), nonce, store, None)
        return None

    def what() -> str:
        return f"worker 0 to announce its address in {path}; found {found}"

    hint = "Check that worker 0 runs and that all workers see the same file."
    meetings.append(wait_for(confirmed, f"Worker {_rank}", what, hint, Config.timeout))
    return meetings[-1].address


def stop_announcing() -> None:
    """Remove worker 0's nonce and file, once all workers are connected."""
    for announced in meetings:
        if announced.file is not None:
            announced.store.delete_key(_NONCE)
            with suppress(OSError):
                if announced.nonce in announced.file.read_text():  # else it is somebody else's by now
                    announced.file.unlink()
    meetings.clear()
