"""Makes directories that appear whole: in `DIR.partial` beside their place, and moved to it once they are complete.

`DIR.partial` holds the new directory, scratch files and a lock. A run that is killed leaves it behind, and the next run
that makes DIR removes it.
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
    """A directory that is being made."""

    path: Path  # folder for its files
    scratch: Path  # folder for files that are needed only meanwhile
    target: Path  # its place once it is complete


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[NewDirectory]:
    """Make a directory in the `with` block; when the block ends, its files are on the disk and it is in its place.

    After an error or a kill there is what was before: nothing, or an empty directory. `ConfigError` if the place is
    taken, another run makes the same directory, or it cannot be made there; `PartitionError` if the disk is full.
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
            check_free(target)  # others may have put files there meanwhile
            put_in_place(new, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def check_free(target: Path) -> None:
    """Raise `ConfigError` unless a directory can be made in a place: there is none yet, or an empty one."""
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
    """Make the directory, or take over the one that a killed run has left, so that no other run uses it."""
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
