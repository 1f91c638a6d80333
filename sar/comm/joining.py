"""Joining a job: the store over which its workers find each other, and what they must have in common.

[Note: one job]
Whoever reaches the port reaches the store, and workers of two jobs on one port would add up each other's numbers. So
worker 0 first writes down which job it is: SAR_JOB_ID, else the nonce of `nfs_ip_init`, else what the launcher calls
it. A worker of another job leaves with an error; the job goes on without it, and warns. Then every worker signs under
its rank, which can be had once, and reads what the others have signed. Where ranks, world sizes or versions clash, all
of them raise. What is not known where nobody names the job stands in SECURITY.md.

The store may outlive the processes: torchrun's agent keeps it when it restarts them, and counts restarts on every host
for itself. So worker 0 begins an attempt, and says when all have signed that. A worker whose rank is taken already in
the attempt that it finds, or who finds one that worker 0 gave up, waits for the next. Keys begin with "sar", so that
other programs that share torch's default port are no workers.
"""

import contextlib
import errno
import ipaddress
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final, NamedTuple

import torch.distributed as dist

from sar.comm import liveness
from sar.comm.liveness import Stall
from sar.comm.store_notes import Abandonable
from sar.config import Config
from sar.errors import CommunicationError, CommunicationTimeout, ConfigError
from sar.logging_setup import logger

POLL_SECONDS: Final = 0.05
CONNECT_SECONDS: Final = 5.0
HEARD_SECONDS: Final = 5.0
"""How long the process that hosts the store stays, after an error, for the others to hear of it."""
RESOLVE_SECONDS: Final = 30.0
"""How long the name of worker 0's host may take to be known."""
COMPARED: Final = ("sar", "torch", "dgl")


class Signature(NamedTuple):
    """What a worker says of itself."""

    rank: int
    world_size: int
    job: str | None
    where: str
    versions: dict[str, str]  # of those of `COMPARED` that are imported

    def __str__(self) -> str:
        return f"Worker {self.rank} of {self.world_size} of {_job_in_words(self.job)} ({self.where})"


class Pulse:
    """Counts what the store has answered."""

    count = 0


def while_it_answers(join: Callable[[Pulse], dist.Store], rank: int, where: str) -> dist.Store:
    """Run what joins over a store, as long as the store answers: see [Note: a store that does not answer].

    `join` gives the job's store; until its pulse beats, it looks for the store. `where` says where that is.
    """
    pulse = Pulse()
    joining, stall, heard, silence = Abandonable(lambda: join(pulse)), Stall(), 0, 0.0
    while joining.is_alive():
        joining.join(POLL_SECONDS)
        silence += POLL_SECONDS  # by rounds and not by the clock, as this process may have been stopped itself
        if pulse.count != heard:
            heard, silence = pulse.count, 0.0
        if not heard:
            stall.report(f"Worker {rank}", lambda: f"{where}; check that worker 0 runs")
        if heard and silence > liveness.SILENCE_SECONDS:
            raise CommunicationTimeout(
                f"Worker {rank} has not heard of {where} for {silence:.0f} s: the process that hosts it, usually "
                "worker 0, is frozen, or its host has vanished."
            )
    return joining.result()


def await_name(host: str) -> None:
    """Wait until the host's name stands for an address; `CommunicationError` where that takes `RESOLVE_SECONDS`.

    torch would try for minutes, and print a warning each time.
    """
    deadline = time.monotonic() + min(RESOLVE_SECONDS, Config.timeout)
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise CommunicationError(
                    f"The name of worker 0's host, {host!r}, stands for no address on {socket.gethostname()} "
                    f"({error.strerror}). Name an address (MASTER_ADDR, or master_ip_address), or add the name to DNS "
                    "or /etc/hosts."
                ) from error
            time.sleep(POLL_SECONDS)


def open_store(host: str, port: int, pulse: Pulse) -> dist.Store:
    """A connection to the job's store; the pulse beats once it is there."""
    deadline = time.monotonic() + Config.timeout
    while not pulse.count:
        try:  # torch would wait for ever where a frozen process listens
            socket.create_connection((host, port), CONNECT_SECONDS).close()
            pulse.count += 1
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)
    limit = timedelta(seconds=Config.timeout)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)


def host_store(host: str, port: int) -> dist.TCPStore:
    """The job's store itself, in this process; port 0 stands for one that is free.

    It listens on `host` only where that is an address, or "localhost"; a name may stand for another one elsewhere.
    """
    listener, limit = _listen(host, port), timedelta(seconds=Config.timeout)
    port, descriptor = listener.getsockname()[1], listener.detach()
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=descriptor)


def _listen(host: str, port: int) -> socket.socket:
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        address = None
    if address is not None:
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        try:
            return socket.create_server((str(address), port), family=family)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            logger.warning("%s is no address of this host; listening on all", host)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both)


def check_in(store: dist.Store, rank: int, world_size: int, job: str | None, pulse: Pulse) -> dist.Store:
    """Wait for all workers of this job, and see that they belong together: see [Note: one job].

    `job` tells this job from others; None where nothing does. Returns the job's part of the store.
    """
    joining = dist.PrefixStore("sar/joining", store)
    where = f"{socket.gethostname()}, process {os.getpid()}"
    mine, everybody = Signature(rank, world_size, job, where, versions()), [f"worker/{k}" for k in range(world_size)]
    if rank == 0:
        attempt = str(joining.add("attempts", 1))
        table: dist.Store = dist.PrefixStore(attempt, joining)
        table.set("worker/0", json.dumps(mine))
        joining.set("latest", attempt)
    else:
        attempt, table = _join_attempt(joining, mine, everybody, pulse)
    try:
        if rank == 0:
            _wait(lambda: table.check(everybody), table, mine, everybody, pulse)
            table.set("complete", "")
        _compare_versions([_read(table, key) for key in everybody])
    except (CommunicationError, ConfigError):
        if rank == 0:  # whose end may be the store's
            deadline = time.monotonic() + HEARD_SECONDS
            while table.add("heard", 0) < world_size - 1 and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        raise
    finally:
        if rank != 0:
            with contextlib.suppress(RuntimeError):  # gone with worker 0
                table.add("heard", 1)
    return dist.PrefixStore(f"sar/{attempt}/{job}", store)


def _join_attempt(
    joining: dist.Store, mine: Signature, everybody: Sequence[str], pulse: Pulse
) -> tuple[str, dist.Store]:
    """Sign in the latest attempt that becomes complete; returns it and its keys."""
    attempt: str | None = None

    def newer() -> bool:
        return joining.check(["latest"]) and joining.get("latest").decode() != attempt

    while True:
        _wait(newer, joining, mine, ["worker/0"], pulse)
        attempt = joining.get("latest").decode()
        table = dist.PrefixStore(attempt, joining)
        try:
            if _sign(table, mine):
                _wait(lambda: table.check(["complete"]) or newer(), table, mine, everybody, pulse)  # noqa: B023
                if table.check(["complete"]):
                    return attempt, table
        except (CommunicationError, ConfigError):
            with contextlib.suppress(RuntimeError):
                table.add("heard", 1)
            raise


def versions() -> dict[str, str]:
    """The versions of what is imported, without what says how it was built."""
    found = {name: getattr(sys.modules.get(name), "__version__", None) for name in COMPARED}
    return {name: str(version).partition("+")[0] for name, version in found.items() if version is not None}


def _sign(table: dist.Store, mine: Signature) -> bool:
    """Write down who this worker is, if the job is its; returns whether its rank was free."""
    first = _read(table, "worker/0")
    if first.job != mine.job:
        table.set(f"stranger/{table.add('strangers', 1)}", str(mine))
        raise CommunicationError(
            f"{mine} has come to the store of {first}. Two jobs share the port: give each its own. If these are one "
            "job, set SAR_JOB_ID to the same on all of its workers."
        )
    if first.world_size != mine.world_size:
        clash = f"{first} and {mine} name different world sizes; name the same."
        table.compare_set("clash", "", clash)
        raise ConfigError(clash)
    if table.add(f"signatures/{mine.rank}", 1) > 1:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return False
        clash = (
            f"{mine} comes after {_read(table, f'worker/{mine.rank}')}. Two workers have one rank, or two jobs share "
            "the port: set another port, or another SAR_JOB_ID, for each."
        )
        table.compare_set("clash", "", clash)
        raise CommunicationError(clash)
    table.set(f"worker/{mine.rank}", json.dumps(mine))
    return True


def _wait(until: Callable[[], bool], table: dist.Store, mine: Signature, what: Sequence[str], pulse: Pulse) -> None:
    """Wait for what others do; raise where workers clash meanwhile, and warn of those of other jobs."""
    deadline = time.monotonic() + Config.timeout
    told, stall = 0, Stall()

    def missing() -> str:
        names = [key.replace("/", " ") for key in what if not table.check([key])]
        return f"{', '.join(names)} to join" if names else "worker 0 to go on"

    while not until():
        pulse.count += 1
        stall.report(str(mine), missing)
        if table.check(["clash"]):
            raise CommunicationError(table.get("clash").decode())
        if mine.rank == 0 and table.check([f"stranger/{told + 1}"]):
            told += 1
            logger.warning("%s tried to join %s", table.get(f"stranger/{told}").decode(), _job_in_words(mine.job))
        if time.monotonic() > deadline:
            strangers = [table.get(f"stranger/{k + 1}").decode() for k in range(told)]
            others = f" Others came, and were refused: {', '.join(strangers)}." if strangers else ""
            raise CommunicationTimeout(
                f"{mine} waited {Config.timeout:g} s (Config.timeout) for {missing()}; check that all run, and name "
                f"the same address and port.{others}"
            )
        time.sleep(POLL_SECONDS)


def _read(table: dist.Store, key: str) -> Signature:
    return Signature(*json.loads(table.get(key)))


def _compare_versions(signed: Sequence[Signature]) -> None:
    for name in COMPARED:
        having = [one for one in signed if name in one.versions]
        if len({one.versions[name] for one in having}) > 1:
            lines = "\n".join(f"  worker {one.rank} ({one.where}): {one.versions[name]}" for one in having)
            raise ConfigError(f"The workers have different versions of {name}:\n{lines}\nInstall the same everywhere.")


def _job_in_words(job: str | None) -> str:
    return "a job without SAR_JOB_ID" if job is None else f"job {job}"
