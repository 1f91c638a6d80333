"""Finding worker 0's address over a shared file.

[Note: stale files]
A file left by an earlier run must not be believed. So worker 0 starts the job's store, puts a fresh nonce into it, and
writes down address, port and nonce. The others believe a file only if a store at that address has the nonce; until then
they read the file again. `initialize_comms` removes nonce and file once everybody is connected, so neither a dead run
nor a living one that is past its set-up confirms its file. Two runs that start on one file at the same time cannot be
told apart: give each its own. The nonce also tells this job from others: see [Note: one job].
"""

import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from sar.comm.environment import own_address
from sar.comm.joining import connect_store, host_store, wait_for
from sar.comm.store_notes import BoundedStore
from sar.config import Config
from sar.errors import CommunicationTimeout, ConfigError
from sar.storage.durable import written_whole

_CONNECT_SECONDS = 2.0
_NONCE = "sar/nonce"


class Meeting(NamedTuple):
    """The job's store, as `nfs_ip_init` has found it for `initialize_comms`."""

    address: str
    port: int
    nonce: str
    store: dist.Store
    file: Path

    def __str__(self) -> str:
        return f"{self.address} {self.port} {self.nonce}\n"


_meeting: Meeting | None = None
_announced: Meeting | None = None  # by this worker, and not confirmed any more once all are connected


def meeting() -> Meeting | None:
    """The result of the latest `nfs_ip_init` in this process, until all workers are connected."""
    return _meeting


def nfs_ip_init(_rank: int, ip_file: str) -> str:
    """Tell worker 0's address to all workers through a file that all of them see.

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
            # torch would try to connect again and again, with a warning each time.
            socket.create_connection((address, int(port)), _CONNECT_SECONDS).close()
            store = connect_store(address, int(port), _CONNECT_SECONDS)
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
    """Stop confirming worker 0's file, and remove it, once everybody is connected."""
    global _meeting, _announced
    announced, _announced, _meeting = _announced, None, None
    if announced is None:
        return
    announced.store.delete_key(_NONCE)
    with suppress(OSError):  # somebody else's by now
        if announced.file.read_text() == str(announced):
            announced.file.unlink()
