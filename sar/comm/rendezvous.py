"""Finding worker 0's address over a shared file.

[Note: stale files]
A file left by an earlier run must not be believed. So worker 0 writes address, port and a fresh nonce, and answers on
that port, with the nonce, until `initialize_comms` has connected everybody; it then removes the file. The others take
an address only when its port echoes the nonce; until then they read the file again. A file of a dead run answers
nothing, and a living run that is past its set-up no longer answers either. Two runs that start on one file at the same
time cannot be told apart: give each its own.

The answer also names the port that worker 0 has taken for the job's store, which is free for sure, and the nonce tells
this job from others: see [Note: one job].
"""

import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import NamedTuple

from sar.comm.interfaces import own_address
from sar.comm.liveness import Stall
from sar.config import Config
from sar.durable import written_whole
from sar.errors import CommunicationTimeout, ConfigError

_POLL_SECONDS = 0.2
_CONNECT_SECONDS = 2.0
_NONCE_BYTES = 16
_ANSWER_BYTES = 64  # more than nonce and port

_announcement: "_Announcement | None" = None
_meeting: "Meeting | None" = None


class Meeting(NamedTuple):
    """What `nfs_ip_init` found out, for `initialize_comms`.

    address, port: of the store.
    nonce: the job's.
    listener: the socket of that port, on worker 0.
    """

    address: str
    port: int
    nonce: str
    listener: socket.socket | None = None


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
    global _announcement, _meeting
    path = Path(ip_file)
    if _rank == 0:
        stop_announcing()
        _announcement = _Announcement(path)
        _meeting = _announcement.meeting
        return _meeting.address
    deadline = time.monotonic() + Config.timeout
    found, stall = "no file", Stall()
    while time.monotonic() < deadline:
        try:
            address, port, nonce = path.read_text().split()
            store_port = _confirmed_port(address, int(port), nonce)
            if store_port is not None:
                _meeting = Meeting(address, store_port, nonce)
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
    """Stop answering and remove worker 0's file, once everybody is connected."""
    global _announcement
    if _announcement is not None:
        _announcement.close()
        _announcement = None


class _Announcement:
    """Worker 0's file, and the thread that answers for it."""

    def __init__(self, path: Path) -> None:
        address = own_address()
        self._path = path
        self._server, listener = socket.create_server((address, 0)), socket.socket()
        listener.bind((address, 0))  # to listen once there is a store that answers
        self.meeting = Meeting(address, listener.getsockname()[1], secrets.token_hex(_NONCE_BYTES // 2), listener)
        self._text = f"{address} {self._server.getsockname()[1]} {self.meeting.nonce}\n"
        try:
            with written_whole(path) as file:
                file.write(self._text.encode())
                os.chmod(file.fileno(), 0o644)
        except OSError as error:
            self._server.close()
            listener.close()
            raise ConfigError(f"Worker 0 cannot write its address to {path}: {error}") from error
        threading.Thread(target=self._answer, name="sar-announce", daemon=True).start()

    def _answer(self) -> None:
        answer = f"{self.meeting.nonce} {self.meeting.port}".encode()
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return  # closed
            with connection:
                connection.settimeout(_CONNECT_SECONDS)
                try:
                    connection.sendall(answer)
                except OSError:
                    continue  # that worker will ask again

    def close(self) -> None:
        # close() alone would leave accept() blocked in the thread.
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        if self.meeting.listener is not None:
            self.meeting.listener.close()  # unless it has become the store's
        try:
            if self._path.read_text() == self._text:
                self._path.unlink()
        except OSError:
            pass  # somebody else's by now


def _confirmed_port(address: str, port: int, nonce: str) -> int | None:
    """The store's port, where what listens there knows the nonce."""
    try:
        with socket.create_connection((address, port), _CONNECT_SECONDS) as connection:
            connection.settimeout(_CONNECT_SECONDS)
            with connection.makefile("rb") as stream:
                answer = stream.read(_ANSWER_BYTES).decode("ascii", "replace").split()
    except OSError:
        return None
    return int(answer[1]) if len(answer) == 2 and answer[0] == nonce else None
