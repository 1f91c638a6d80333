"""Finding worker 0's address over a shared file.

[Note: stale files]
A file left by an earlier run must not be believed. So worker 0 starts the job's store, puts a fresh nonce into it, and
writes down address, port and nonce. The others take an address only when a store is there that has the nonce; until
then they read the file again. `initialize_comms` removes nonce and file once everybody is connected, so neither a dead
run nor a living one that is past its set-up confirms its file. Two runs that start on one file at the same time cannot
be told apart: give each its own. The nonce also tells this job from others: see [Note: one job].
"""

import os
import secrets
import socket
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from sar.comm.environment import own_address
from sar.comm.joining import host_store
from sar.comm.liveness import Stall
from sar.comm.store_notes import Abandonable
from sar.config import Config
from sar.durable import written_whole
from sar.errors import CommunicationTimeout, ConfigError

_POLL_SECONDS = 0.2
_CONNECT_SECONDS = 2.0
_NONCE = "sar/nonce"


class Meeting(NamedTuple):
    """What `nfs_ip_init` found out about the job's store, for `initialize_comms`."""

    address: str
    port: int
    nonce: str
    store: dist.Store | None = None  # on worker 0, which hosts it
    file: Path | None = None  # that worker 0 wrote

    def __str__(self) -> str:
        return f"{self.address} {self.port} {self.nonce}\n"


_meeting: Meeting | None = None
_announced: Meeting | None = None


def meeting() -> Meeting | None:
    """What the latest `nfs_ip_init` of this process found out."""
    return _meeting


def nfs_ip_init(_rank: int, ip_file: str) -> str:
    """Tell worker 0's address to all workers through a file that all of them see.

    Args:
        _rank: this worker.
        ip_file: path of the file; worker 0 replaces it. An old file does no harm: see [Note: stale files].

    Returns:
        The address of worker 0, for `initialize_comms`.

    Raises:
        ConfigError: where worker 0 cannot write the file.
        CommunicationTimeout: where no living worker 0 shows up within `Config.timeout`.
    """
    global _meeting, _announced
    path = Path(ip_file)
    if _rank == 0:
        stop_announcing()
        _meeting = _announced = _announce(path)
        return _meeting.address
    deadline = time.monotonic() + Config.timeout
    found, stall = "no file", Stall()
    while time.monotonic() < deadline:
        try:
            address, port, nonce = path.read_text().split()
            if _confirmed(address, int(port), nonce):
                _meeting = Meeting(address, int(port), nonce)
                return address
            found = f"an old file: {address}:{port} does not confirm it"
        except FileNotFoundError:
            found = "no file"
        except ValueError:
            found = "a file of another form"
        stall.report(f"Worker {_rank}", lambda: f"worker 0 to announce its address in {path}; found {found}")  # noqa: B023
        time.sleep(_POLL_SECONDS)
    raise CommunicationTimeout(
        f"Worker {_rank} waited {Config.timeout:g} s (Config.timeout) for worker 0 to announce its address in {path}; "
        f"found {found}. Check that worker 0 runs and that all workers see the same file."
    )


def stop_announcing() -> None:
    """Stop confirming worker 0's file, and remove it, once everybody is connected."""
    global _meeting, _announced
    announced, _announced = _announced, None
    if announced is None or announced.store is None or announced.file is None:
        return
    _meeting = announced._replace(store=None)
    announced.store.delete_key(_NONCE)
    with suppress(OSError):  # somebody else's by now
        if announced.file.read_text() == str(announced):
            announced.file.unlink()


def _announce(path: Path) -> Meeting:
    """Start the store, and write the file."""
    address, nonce = own_address(), secrets.token_hex(8)
    store = host_store(address, 0)
    store.set(_NONCE, nonce)
    made = Meeting(address, store.port, nonce, store, path)
    try:
        with written_whole(path) as file:
            file.write(str(made).encode())
            os.chmod(file.fileno(), 0o644)
    except OSError as error:
        raise ConfigError(f"Worker 0 cannot write its address to {path}: {error}") from error
    return made


def _confirmed(address: str, port: int, nonce: str) -> bool:
    """Whether a store listens there that has the nonce."""

    def ask() -> bool:
        socket.create_connection((address, port), _CONNECT_SECONDS).close()  # torch would try again, and complain
        limit = timedelta(seconds=_CONNECT_SECONDS)
        store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)
        return store.check([_NONCE]) and store.get(_NONCE).decode() == nonce

    asking = Abandonable(ask)  # what listens there may be frozen, or no store
    asking.join(2 * _CONNECT_SECONDS)
    try:
        return not asking.is_alive() and asking.result()
    except (OSError, RuntimeError, OverflowError):
        return False
