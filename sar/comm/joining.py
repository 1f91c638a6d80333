"""Joining a job: the store over which its workers find each other, and the sign-in that compares them.

[Note: one job]
Whoever reaches the port reaches the store, and workers of two jobs on one port would add up each other's numbers. So
each worker signs in under its rank, with its world size, its job and its versions, worker 0 first. The job is
SAR_JOB_ID, else the nonce of `nfs_ip_init`, else the launcher's name of it. A worker of another job finds worker 0's
signature, raises and leaves the job alone. If ranks, world sizes or versions clash, all workers raise. SECURITY.md says
which jobs cannot be told apart. Keys begin with "sar", so that other programs on torch's default port are no workers,
and with torchrun's number of the restart, as its agent may keep a store in which earlier workers have signed.
"""

import errno
import ipaddress
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final, NamedTuple, TypeVar

import torch.distributed as dist

from sar.comm import liveness
from sar.comm.liveness import Stall
from sar.comm.store_notes import Abandonable, BoundedStore, SilentStoreError
from sar.config import Config
from sar.errors import CommunicationError, CommunicationTimeout, ConfigError, SarError
from sar.logging_setup import logger

T = TypeVar("T")

POLL_SECONDS: Final = 0.05
CONNECT_SECONDS: Final = 5.0
HEARD_SECONDS: Final = 3.0
"""How long worker 0, which usually hosts the store, stays after an error for the others to hear of it."""
RESOLVE_SECONDS: Final = 30.0
"""How long the name of worker 0's host may take to be known."""
COMPARED: Final = ("sar", "torch", "dgl")


class Signature(NamedTuple):
    """A worker's description of itself."""

    rank: int
    world_size: int
    job: str | None
    where: str
    versions: dict[str, str]  # of those of `COMPARED` that are imported

    def __str__(self) -> str:
        job = "a job without SAR_JOB_ID" if self.job is None else f"job {self.job}"
        return f"Worker {self.rank} of {self.world_size} of {job} ({self.where})"


def wait_for(look: Callable[[], T | None], who: str, what: Callable[[], str], seconds: float) -> T | None:
    """Call `look` until it gives something, and return that; warns of long waits.

    After so many seconds this returns None, or raises the OSError of the latest call. A store that is silent raises
    SilentStoreError once it has been so for as long as a worker may be.
    """
    deadline, stall, silence = time.monotonic() + seconds, Stall(), 0.0
    while True:
        try:
            found = look()
            if found is not None or time.monotonic() > deadline:
                return found
            silence = 0.0
            stall.report(who, what)
        except SilentStoreError:
            silence += POLL_SECONDS  # by rounds and not by the clock, as this process may have been stopped itself
            if silence > liveness.SILENCE_SECONDS:
                raise
        except SarError:
            raise
        except OSError:
            if time.monotonic() > deadline:
                raise
            stall.report(who, what)
        time.sleep(POLL_SECONDS)


def await_name(host: str, who: str) -> None:
    """Wait until the host's name stands for an address; torch would try for minutes, with a warning each time."""
    limit = min(RESOLVE_SECONDS, Config.timeout)
    try:
        wait_for(lambda: socket.getaddrinfo(host, None), who, lambda: f"the address of {host}", limit)
    except OSError as error:
        raise CommunicationError(
            f"The name of worker 0's host, {host!r}, stands for no address on {socket.gethostname()} "
            f"({error.strerror}). Name an address (MASTER_ADDR, or master_ip_address), or add the name to DNS "
            "or /etc/hosts."
        ) from error


def connect_store(host: str, port: int, seconds: float) -> dist.Store:
    """A connection to a store that another process hosts; SilentStoreError if that does not answer in time."""
    limit = timedelta(seconds=seconds)
    connecting = Abandonable(lambda: dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit))
    connecting.join(seconds)
    if connecting.is_alive():
        raise SilentStoreError(f"The store at {host}:{port} has not answered for {seconds:g} s.")
    connecting.result().set_timeout(timedelta(seconds=Config.timeout))
    return connecting.result()


def find_store(host: str, port: int, who: str) -> dist.Store:
    """A connection to the job's store, for which this worker waits; an OSError if nobody listens in time."""

    def listening() -> bool:  # torch would print a warning for each try, and wait for ever for a frozen process
        socket.create_connection((host, port), CONNECT_SECONDS).close()
        return True

    wait_for(listening, who, lambda: f"the job's store at {host}:{port}; check that worker 0 runs", Config.timeout)
    return connect_store(host, port, liveness.SILENCE_SECONDS)


def host_store(host: str, port: int) -> dist.TCPStore:
    """The job's store itself, in this process; port 0 stands for one that is free.

    It listens on `host` only if that is an address, or "localhost"; a name may stand for another one elsewhere.
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
    """Wait for all workers of this job, and see that they belong together: see [Note: one job].

    `job` tells this job from others; None if nothing does. Returns the job's part of the store.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    table = BoundedStore(dist.PrefixStore(f"sar/joining/{restart}", store))
    where = f"{socket.gethostname()}, process {os.getpid()}"
    own, everybody = Signature(rank, world_size, job, where, versions()), [f"worker/{k}" for k in range(world_size)]

    def signatures(keys: Sequence[str]) -> list[Signature]:
        """Those under these keys, once they are all there."""

        def look() -> list[str | None] | None:
            [clash] = table.read(["clash"])
            if clash is not None:
                raise CommunicationError(clash)
            return table.read(keys) if table.ask(lambda store: store.check(list(keys))) else None

        def missing() -> str:
            absent = [key.replace("/", " ") for key, there in zip(keys, table.read(keys), strict=True) if there is None]
            return f"{', '.join(absent)} to join"

        texts = wait_for(look, str(own), missing, Config.timeout)
        if texts is None:
            raise CommunicationTimeout(
                f"{own} waited {Config.timeout:g} s (Config.timeout) for {missing()}; check that all run, and name the "
                "same address and port."
            )
        return [Signature(*json.loads(text or "")) for text in texts]

    def tell_all(clash: SarError) -> SarError:
        table.ask(lambda store: store.compare_set("clash", "", str(clash)))
        return clash

    try:
        if rank != 0:
            [first] = signatures(["worker/0"])
            if first.job != job:
                raise CommunicationError(
                    f"{own} has come to the store of {first}. Two jobs share the port: give each its own. If these are "
                    "one job, set SAR_JOB_ID to the same on all of its workers."
                )
            if first.world_size != world_size:
                raise tell_all(ConfigError(f"{first} and {own} name different world sizes; name the same."))
        if table.ask(lambda store: store.add(f"taken/{rank}", 1)) > 1:
            [other] = signatures([f"worker/{rank}"])
            raise tell_all(
                CommunicationError(
                    f"{own} comes after {other}. Two workers have one rank, or two jobs share the port: set another "
                    "port, or another SAR_JOB_ID, for each."
                )
            )
        table.ask(lambda store: store.set(f"worker/{rank}", json.dumps(own)))
        signed = signatures(everybody)
        for name in COMPARED:
            having = [one for one in signed if name in one.versions]
            if len({one.versions[name] for one in having}) > 1:
                lines = "\n".join(f"  worker {one.rank} ({one.where}): {one.versions[name]}" for one in having)
                raise ConfigError(
                    f"The workers have different versions of {name}:\n{lines}\nInstall the same everywhere."
                )
    except SarError:
        if rank == 0:
            time.sleep(HEARD_SECONDS)
        raise
    return dist.PrefixStore(f"sar/{restart}/{job}", store)


def versions() -> dict[str, str]:
    """The versions of the packages that are imported, without the part that says how they were built."""
    found = {name: getattr(sys.modules.get(name), "__version__", None) for name in COMPARED}
    return {name: str(version).partition("+")[0] for name, version in found.items() if version is not None}
