"""Compiled code that is kept on disk: where, how it is found again, and that one process makes it for all of a host.

[Note: compiled once]
Code lies in the user's cache directory, under names that hold a digest of its sources, so that every environment with
the same sources, Numba and processor finds it. Who finds none takes a lock that is the kernel's own, and looks again:
then another process has made it meanwhile, or nobody else is making it. The system drops the lock of a process that
ends. A lock that cannot be had, or not in time, is done without: the code is then made twice, and is the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import IO

from sar.logging_setup import logger

WAIT_SECONDS = 60.0  # how long a process waits for another one's code before it makes its own

POLL_SECONDS = 0.02
NOTED_SECONDS = 0.5  # what is compiled faster is not worth a line in the log


class TakenElsewhereError(Exception):
    """Another process is making this code; raised only inside `nothing_awaited`."""


_waits = True
_spent = 0.0


@cache
def code_folder() -> Path | None:
    """Where code is kept: below `NUMBA_CACHE_DIR`, else in the user's cache directory, else in this package's folder,
    whichever can be written first; None where none can."""
    given, user = os.environ.get("NUMBA_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    below = f"sar-kernels-numba-{version('numba')}"
    with contextlib.suppress(RuntimeError):  # no home
        for parent in (given, user or Path.home() / ".cache", Path(__file__).parent / "__pycache__"):
            if parent and _is_writable(folder := Path(parent) / below):
                return folder
    logger.info("Found no folder for compiled code, which is made anew in every run; set NUMBA_CACHE_DIR to one")
    return None


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


@cache
def digest_of(*sources: Path) -> str:
    """A digest of files, and of folders with all their Python files."""
    digest = hashlib.blake2b(digest_size=4)
    for source in sources:
        for file in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            digest.update(file.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def nothing_awaited() -> Iterator[None]:
    """Have what another process is making raise `TakenElsewhereError` inside."""
    global _waits
    _waits = False
    try:
        yield
    finally:
        _waits = True


class Turn:
    """The right to make one kernel's code, and the clock that runs from the first wish for it."""

    def __init__(self, name: str) -> None:
        self._name, self._began = name, time.monotonic()
        self._file = _lock(name)

    def end(self) -> None:
        """Let others have it."""
        global _spent
        if self._file is not None:
            self._file.close()
        _spent += (seconds := time.monotonic() - self._began)
        if seconds > NOTED_SECONDS:
            logger.info("compiling kernels, once: %.0f s so far (%s)", _spent, self._name)


def _lock(name: str) -> IO[bytes] | None:
    """The kernel's lock, a file to be closed; None where there is no locking or it is held for too long."""
    folder = code_folder()
    assert folder is not None
    try:
        file = (folder / f"{name}.lock").open("wb")
    except OSError:
        return None
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if not _waits:
                file.close()
                raise TakenElsewhereError(name) from None
        except OSError:  # a file system without locks
            deadline = 0.0
        if time.monotonic() > deadline:
            file.close()
            return None
        time.sleep(POLL_SECONDS)
