"""Rendezvous of the workers: a shared file for worker 0's address, the job's store, and the sign-in.

[Note: stale files]
A file left by an earlier run must be detected. So worker 0 starts the job's store, puts a fresh nonce into it, and
writes address, port and nonce to the file. The others trust a file only if a store at that address has the nonce; until
then they read the file again. `initialize_comms` removes nonce and file once all workers are connected, so a run that
has ended or is past its set-up confirms no file. Two runs that start on one file at the same time cannot be told apart:
give each its own.

[Note: one job]
Any process that reaches the port reaches the store, and workers of two jobs on one port would exchange data. So each
worker signs a log with its rank, world size, job and versions, and all read the log in the same order until the job of
the first worker 0 in it is complete. Workers of another job raise, and leave this one alone; if ranks, world sizes or
versions clash before the job is complete, all of its workers raise. The job is SAR_JOB_ID, else the nonce of
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
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import torch.distributed as dist

from sar.comm import liveness
from sar.comm.environment import own_address
from sar.comm.liveness import Stall
from sar.comm.store_notes import BoundedStore, SilentStoreError, in_background
from sar.config import Config
from sar.durable import written_whole
from sar.errors import CommunicationError, CommunicationTimeout, ConfigError, SarError
from sar.logging_setup import logger

T = TypeVar("T")

POLL_SECONDS: Final = 0.05
CONNECT_SECONDS: Final = 2.0
HEARD_SECONDS: Final = 3.0  # delay of an error in worker 0, which usually hosts the store, so that others can read it
RESOLVE_SECONDS: Final = 30.0  # until the name of worker 0's host must be known
COMPARED: Final = ("sar", "torch", "dgl")
FROZEN: Final = ": the process that hosts it, usually worker 0, is frozen, or its host has vanished."
_NONCE: Final = "sar/nonce"


class Signature(NamedTuple):
    """A worker's entry in the log of the sign-in."""

    rank: int
    world_size: int
    job: str | None
    where: str
    versions: dict[str, str]  # versions of the packages of `COMPARED` that are imported

    def __str__(self) -> str:
        job = "a job without SAR_JOB_ID" if self.job is None else f"job {self.job}"
        return f"Worker {self.rank} of {self.world_size} of {job} ({self.where})"


def wait_for(look: Callable[[], T], who: str, what: Callable[[], str], seconds: float) -> T:
    """Call `look` until it returns anything but None and raises no OSError. Warns of long waits.

    After `seconds` this returns None, or raises the latest OSError. If the store does not answer for
    `liveness.SILENCE_SECONDS`, this raises CommunicationTimeout.
    """
    began, stall, silence = time.monotonic(), Stall(), 0.0
    while True:
        waited = time.monotonic() - began
        try:
            result = look()
            if result is not None or waited > seconds:
                return result
            silence = 0.0
        except SarError:  # some of which are OSErrors
            raise
        except SilentStoreError:
            silence += POLL_SECONDS  # counts rounds, not time, because this process may have been stopped itself
            if silence > liveness.SILENCE_SECONDS:
                raise CommunicationTimeout(
                    f"{who} has not heard of the job's store for {silence:.0f} s{FROZEN}"
                ) from None
        except OSError:
            if waited > seconds:
                raise
        if stall.due(waited):
            logger.warning("%s has waited %.0f s for %s", who, waited, what())
        time.sleep(POLL_SECONDS)


def await_name(host: str, who: str) -> None:
    """Wait until the host's name can be resolved. Torch would try for minutes, with a warning each time."""
    limit = min(RESOLVE_SECONDS, Config.timeout)
    try:
        wait_for(lambda: socket.getaddrinfo(host, None), who, lambda: f"the address of {host}", limit)
    except OSError as error:
        raise CommunicationError(
            f"The name of worker 0's host, {host!r}, stands for no address on {socket.gethostname()} "
            f"({error.strerror}). Name an address (MASTER_ADDR, or master_ip_address), or add the name to DNS "
            "or /etc/hosts."
        ) from error


def connect_store(host: str, port: int, who: str, seconds: float) -> dist.Store:
    """Connect to another process's store. Raises OSError if nobody listens, CommunicationTimeout if it is frozen."""
    socket.create_connection((host, port), CONNECT_SECONDS).close()  # torch would try again, with a warning each time
    limit = timedelta(seconds=seconds)
    connecting = in_background(
        lambda: dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    )
    futures.wait([connecting], seconds)
    if not connecting.done():
        raise CommunicationTimeout(f"{who} has not heard of the job's store at {host}:{port} for {seconds:g} s{FROZEN}")
    connecting.result().set_timeout(timedelta(seconds=Config.timeout))
    return connecting.result()


def find_store(host: str, port: int, who: str) -> dist.Store:
    """Wait for the job's store, and connect to it. Raises OSError if nobody listens in time."""
    return wait_for(
        lambda: connect_store(host, port, who, liveness.SILENCE_SECONDS),
        *(who, lambda: f"the job's store at {host}:{port}; check that worker 0 runs", Config.timeout),
    )


def host_store(host: str, port: int) -> dist.TCPStore:
    """Start the job's store in this process. Port 0 selects a free port.

    If `host` is an address or "localhost", the store listens on that address only. Otherwise it listens on all, because
    other hosts may resolve a name to another address.
    """
    listener = None
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        listener = socket.create_server((str(address), port), family=family)
    except ValueError:
        pass  # a name
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        logger.warning("%s is no address of this host; listening on all", host)
    if listener is None:
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
    own = Signature(rank, world_size, job, f"{socket.gethostname()}, process {os.getpid()}", versions())
    number = table.ask(lambda store: store.add("signed", 1))
    table.ask(lambda store: store.set(f"signature/{number}", json.dumps(own)))
    log: list[Signature] = []

    def everybody() -> list[Signature] | None:
        count = table.ask(lambda store: store.add("signed", 0))
        for text in table.read([f"signature/{n}" for n in range(len(log) + 1, count + 1)]):
            if text is None:  # about to be written
                break
            log.append(Signature(*json.loads(text)))
        return _workers_of_job(log, own, number)

    def missing() -> str:
        present = {signature.rank for signature in log if signature.job == job}
        return f"{', '.join(f'worker {k}' for k in range(world_size) if k not in present)} to join"

    try:
        workers = wait_for(everybody, str(own), missing, Config.timeout)
        if workers is None:
            raise CommunicationTimeout(
                f"{own} waited {Config.timeout:g} s (Config.timeout) for {missing()}; check that all run, and name the "
                "same address and port."
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


def _workers_of_job(log: Sequence[Signature], own: Signature, number: int) -> list[Signature] | None:
    """The workers of the log's job, by rank; None if some are missing. `own` is entry `number` of the log, from 1."""
    first = next((signature for signature in log if signature.rank == 0), None)
    if first is None or len(log) < number:
        return None
    if first.job != own.job:
        raise CommunicationError(
            f"{own} has reached the store of {first}. Two jobs share the port: use another port for each. If these are "
            "one job, set SAR_JOB_ID to the same on all of its workers."
        )
    workers: dict[int, Signature] = {}
    for position, signature in enumerate(log, 1):
        complete = len(workers) == first.world_size
        if signature.job != own.job or (complete and position != number):  # those who come too late raise alone
            continue
        if signature.world_size != first.world_size:
            raise ConfigError(f"{first} and {signature} name different world sizes; name the same.")
        if signature.rank in workers:
            raise CommunicationError(
                f"{signature} comes after {workers[signature.rank]}. Two workers have one rank, or two jobs share the "
                "port: set another port, or another SAR_JOB_ID, for each."
            )
        workers[signature.rank] = signature
    return [workers[k] for k in range(first.world_size)] if len(workers) == first.world_size else None


def versions() -> dict[str, str]:
    """Versions of the imported packages, without their local build labels."""
    imported = {name: getattr(sys.modules.get(name), "__version__", None) for name in COMPARED}
    return {name: str(version).partition("+")[0] for name, version in imported.items() if version is not None}


class Meeting(NamedTuple):
    """The job's store, found by `nfs_ip_init` for `initialize_comms`."""

    address: str
    port: int
    nonce: str
    store: dist.Store
    file: Path

    def __str__(self) -> str:
        return f"{self.address} {self.port} {self.nonce}\n"


_meeting: Meeting | None = None
_announced: Meeting | None = None  # announced by this worker; no longer confirmed once all are connected


def meeting() -> Meeting | None:
    """The result of the latest `nfs_ip_init` in this process, until all workers are connected."""
    return _meeting


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
    global _meeting, _announced
    path = Path(ip_file)
    if _rank == 0:
        stop_announcing()
        address, nonce = own_address(), secrets.token_hex(8)
        store = host_store(address, 0)
        store.set(_NONCE, nonce)
        announced = Meeting(address, store.port, nonce, store, path)
        try:
            with written_whole(path) as file:
                file.write(str(announced).encode())
                os.chmod(file.fileno(), 0o644)
        except OSError as error:
            raise ConfigError(f"Worker 0 cannot write its address to {path}: {error}") from error
        _meeting = _announced = announced
        return address
    state = "no file"

    def confirmed() -> Meeting | None:
        nonlocal state
        try:
            address, port, nonce = path.read_text().split()
            state = f"an old file: {address}:{port} does not confirm it"
            store = connect_store(address, int(port), f"Worker {_rank}", CONNECT_SECONDS)
            if BoundedStore(store).read([_NONCE]) == [nonce]:
                return Meeting(address, int(port), nonce, store, path)
        except FileNotFoundError:
            state = "no file"
        except ValueError:
            state = "a file of another form"
        except (OSError, RuntimeError, OverflowError):  # a service of another kind, or a frozen one
            pass
        return None

    def what() -> str:
        return f"worker 0 to announce its address in {path}; found {state}"

    _meeting = wait_for(confirmed, f"Worker {_rank}", what, Config.timeout)
    if _meeting is None:
        raise CommunicationTimeout(
            f"Worker {_rank} waited {Config.timeout:g} s (Config.timeout) for {what()}. Check that worker 0 runs and "
            "that all workers see the same file."
        )
    return _meeting.address


def stop_announcing() -> None:
    """Remove worker 0's nonce and file, once all workers are connected."""
    global _meeting, _announced
    announced, _announced, _meeting = _announced, None, None
    if announced is None:
        return
    announced.store.delete_key(_NONCE)
    with suppress(OSError):  # somebody else's by now
        if announced.file.read_text() == str(announced):
            announced.file.unlink()
