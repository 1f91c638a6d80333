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

from sar.data.checksums import SUMS
from sar.data.partition_json import read_partition_json
from sar.errors import ConfigError, PartitionError
from sar.host.durable import put_in_place, sync

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY)
_OWN_NAMES = {"new", "old", "scratch", "lock"}


class NewDirectory(NamedTuple):
    """A directory that is being made."""

    path: Path  # folder for its files
    scratch: Path  # folder for files that are needed only meanwhile
    target: Path  # its place once it is complete


@contextlib.contextmanager
def new_directory(target: Path, *, overwrite: bool | None = None) -> Iterator[NewDirectory]:
    """Make a directory in the `with` block; when the block ends, its files are on the disk and it is in its place.

    An error leaves the state before: nothing, an empty directory or, with `overwrite`, earlier partitions. So does a
    kill, but for the moment between two moves in which the earlier partitions are in `DIR.partial/old`; the next run
    puts them back first.

    Args:
        target: the directory.
        overwrite: whether to replace earlier partitions; None if the caller has no such option.

    Raises:
        ConfigError: the place is taken, another run makes the same directory, or it cannot be made there.
        PartitionError: the disk is full.
    """
    target = target.resolve() if target.is_symlink() else Path(os.path.abspath(target))
    check_replaceable(target, overwrite)
    partial = target.with_name(f"{target.name}.partial")
    new, old, scratch = (partial / name for name in ("new", "old", "scratch"))
    with _disk_explained(partial), _locked(partial):
        try:
            if old.exists() and not target.exists():  # a kill between the two moves below
                old.replace(target)
            for left in (new, old, scratch):
                shutil.rmtree(left, ignore_errors=True)
            new.mkdir()
            scratch.mkdir()
            yield NewDirectory(new, scratch, target)
            shutil.rmtree(scratch)
            for path in new.rglob("*"):
                sync(path)
            check_replaceable(target, overwrite)  # others may have put files there meanwhile
            if target.is_dir() and any(target.iterdir()):
                target.replace(old)
            try:
                put_in_place(new, target)
            except BaseException:
                if old.exists():
                    old.replace(target)
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)


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


def check_replaceable(target: Path, overwrite: bool | None = None) -> None:
    """Raise `ConfigError` unless a directory can be made in a place: as for `new_directory`."""
    if target.exists() and not target.is_dir():
        raise ConfigError(f"'{target}' is a file; name a directory that does not exist or is empty.")
    names = sorted(os.listdir(target)) if target.is_dir() else []
    if names and not overwrite:
        asked = "" if overwrite is None else " unless asked (--overwrite)"
        raise ConfigError(
            f"'{target}' already holds {_some(names)}, and nothing is overwritten{asked}; name another directory."
        )
    if target.is_mount():
        raise ConfigError(f"'{target}' is a mount point, which cannot be replaced; name a directory inside it.")
    if not names:
        return
    try:
        spec = read_partition_json(target)
    except PartitionError as error:
        raise ConfigError(f"'{target}' is overwritten only if it holds partitions. {error}") from error
    written = {Path(os.path.relpath(file, target)) for files in spec.files for file in files.values()}
    written |= {file.with_name(SUMS) for file in written} | {Path(spec.path.name), Path("report.json")}
    folders = {parent for file in written for parent in file.parents}
    there = {path.relative_to(target) for path in target.rglob("*")} - folders
    if others := sorted(map(str, there - written)):
        raise ConfigError(
            f"'{target}' is not overwritten, as it holds {_some(others)} beside partitions; move that elsewhere."
        )


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
