"""Creates directories atomically: in `DIR.partial` next to DIR, which is renamed when complete.

`DIR.partial` holds the new directory, scratch files and a lock. A killed run leaves it, and the next run that creates
DIR removes it.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from sar.errors import ConfigError, PartitionError
from sar.host.durable import put_in_place, sync

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY)
_OWN_NAMES = {"new", "scratch", "lock"}


class NewDirectory(NamedTuple):
    """A directory under construction."""

    path: Path  # folder for its files
    scratch: Path  # folder for temporary files
    target: Path  # final path


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[NewDirectory]:
    """Create a directory in the `with` block; when the block ends, its files are on disk and it has its final path.

    After an error or a kill, the path is unchanged: missing, or an empty directory. `ConfigError` if the path is not
    empty, another run creates the same directory, or it cannot be created; `PartitionError` if the disk is full.
    """
    target = target.resolve() if target.is_symlink() else Path(os.path.abspath(target))
    check_free(target)
    partial = target.with_name(f"{target.name}.partial")
    new, scratch = partial / "new", partial / "scratch"
    with _disk_explained(partial), _locked(partial):
        try:
            for folder in (new, scratch):
                shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
                folder.mkdir()
            yield NewDirectory(new, scratch, target)
            shutil.rmtree(scratch)
            for path in new.rglob("*"):
                sync(path)
            check_free(target)  # another program may have written files there
            put_in_place(new, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def check_free(target: Path) -> None:
    """Raise `ConfigError` unless the path does not exist or is an empty directory."""
    if target.exists() and not target.is_dir():
        raise ConfigError(f"'{target}' is a file; name a directory that does not exist or is empty.")
    if target.is_dir() and (names := sorted(os.listdir(target))):
        raise ConfigError(
            f"'{target}' already holds {_some(names)}, and nothing is overwritten; remove it, or name another."
        )
    if target.is_mount():
        raise ConfigError(f"'{target}' is a mount point, which cannot be replaced; name a directory inside it.")


@contextlib.contextmanager
def _locked(partial: Path) -> Iterator[BinaryIO]:
    """Create and lock the directory, or take over that of a killed run, to keep out other runs."""
    partial.mkdir(parents=True, exist_ok=True)
    if others := sorted({*os.listdir(partial)} - _OWN_NAMES):
        raise ConfigError(
            f"'{partial}' holds {_some(others)}, which this version of sar has not written, and the directory is "
            "needed while the new one is made; move it elsewhere, or remove it."
        )
    with (partial / "lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another run is making '{partial}'; wait for it, or choose another place. One process writes all "
                "parts, so start it once, without torchrun or srun."
            ) from error
        yield lock


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


@contextlib.contextmanager
def _disk_explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FORBIDDEN:
            named = error.filename2 or error.filename or path
            raise ConfigError(f"'{named}' cannot be made ({error.strerror}); name a directory elsewhere.") from error
        if error.errno not in _FULL:
            raise
        raise PartitionError(
            f"the disk of '{path}' is full ({error.strerror}), with {shutil.disk_usage(path.parent).free:,} bytes free "
            "now. Free some, or name a directory elsewhere."
        ) from error
