"""Compiled code on disk: the folder, and the lock with which one process compiles for all of a host.

[Note: compiled once]
A file's name holds a digest of the sources, so every environment with the same sources, Numba and processor finds it.
A process that finds no code takes the kernel's lock and looks again, because another process may have compiled it in
the meantime. The system drops the lock of a process that ends. If the lock cannot be had, or not in time, the process
compiles without it: the code is then made twice, and is the same.
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

from sar import splitmix
from sar.logging_setup import logger

WAIT_SECONDS = 60.0  # for a lock

POLL_SECONDS = 0.02
NOTED_SECONDS = 0.5  # what compiles faster is not worth a line in the log

HERE = Path(__file__).parent
SHARED_SOURCES = [*HERE.glob("*.py"), *(HERE / "cpu").glob("*.py")]


@cache
def code_folder() -> Path | None:
    """The first folder that can be written: below `NUMBA_CACHE_DIR`, the user's cache directory, this package's own.

    None if there is none.
    """
    given, user = os.environ.get("NUMBA_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # no home
        for parent in (given, user or Path.home() / ".cache", HERE / "__pycache__"):
            if parent:
                folder = Path(parent) / f"sar-kernels-numba-{version('numba')}"
                with contextlib.suppress(OSError):
                    folder.mkdir(parents=True, exist_ok=True)
                    if os.access(folder, os.W_OK | os.X_OK):
                        return folder
    logger.info("Found no folder for compiled code, which is made anew in every run; set NUMBA_CACHE_DIR to one")
    return None


@cache
def digest_of_sources(folder: Path) -> str:
    """A digest of the files that code of a folder may come from: its own, and those with helpers for all kernels."""
    digest = hashlib.blake2b(digest_size=4)
    for file in sorted({*folder.rglob("*.py"), *SHARED_SOURCES, Path(splitmix.__file__)}):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def compiling(name: str) -> Iterator[None]:
    """Hold a kernel's lock while it is compiled, and log how long that takes."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # no locks, or no space
            file = stack.enter_context((code_folder() or HERE).joinpath(f"{name}.lock").open("wb"))
            while time.monotonic() < began + WAIT_SECONDS:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(POLL_SECONDS)
        yield
    if (seconds := time.monotonic() - began) > NOTED_SECONDS:
        logger.info("compiled a kernel, once for this host: %.1f s (%s)", seconds, name)
