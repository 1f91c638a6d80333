"""Where a directory is made: beside its place, under another name, until it is complete and moved there.

A run that is killed leaves `DIR.partial` behind, with a record of the steps that it has finished; a run that is asked
to resume goes on from there. Only the last step waits for the disk, so the record outlives the process, but not the
machine: after a restart it is not believed, and the steps are taken again. A run that fails removes what it made, but
for one that is asked to resume.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from sar.data.checksums import SUMS
from sar.data.partition_json import read_partition_json
from sar.durable import put_in_place, sync
from sar.errors import ConfigError, PartitionError
from sar.logging_setup import logger
from sar.partition.write.writers import Writers

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTEMPTY)  # the last: filled since by somebody else
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Staging:
    """A directory in the making, and this process's record of finished steps."""

    def __init__(self, target: Path, writers: Writers, digest: str, overwrite: bool) -> None:
        self.target, self.writers = target, writers
        self.path = target.with_name(f"{target.name}.partial")  # where it is until it is complete
        self.replaced = target.with_name(f"{target.name}.replaced")  # where one goes whose place another takes
        self.earlier: set[Path] = set()  # the files that it has then, all written by partitioners; relative to it
        self.scratch = self.path / "scratch"  # of all who share the directory; finished steps do not need it
        self.assignment = self.path / "assignment"  # the file with the part of every node
        self.lock = self.path / "lock"  # held by who makes the directory; the first file to go where that fails
        self.leads = True  # whether this process speaks for those that share the directory
        self._record = self.path / f"progress-{writers.rank}.json"
        self._digest, self._overwrite = digest, overwrite
        self._done: dict[str, Any] = {}
        self._boot = _BOOT.read_text() if _BOOT.exists() else ""

    def step(self, name: str, work: Callable[[], Any]) -> Any:
        """What `work` returns, which JSON can hold; it is not called again when a killed run is resumed after it.

        All processes take the step together: a resumed run calls `work` again on all, if one had not finished it. What
        a call that was killed has done, the next one overwrites.
        """
        if not self.writers.all(name in self._done):
            self._done.pop(name, None)
        return self.own_step(name, work)

    def own_step(self, name: str, work: Callable[[], Any]) -> Any:
        """As `step`, for work that this process does without the others."""
        if name not in self._done:
            self._done[name] = work()
            self._save()
        return self._done[name]

    def _save(self) -> None:
        unfinished = self._record.with_suffix(".new")
        unfinished.write_text(json.dumps({"digest": self._digest, "boot": self._boot, "steps": self._done}))
        unfinished.replace(self._record)

    def _begin(self, resume: bool) -> BinaryIO:
        """Make the directory, or take over what a killed run has left."""
        if self.path.exists() and not resume:
            raise ConfigError(
                f"'{self.path}' is there: a run that was stopped has left it, or one that still goes on makes it. "
                "Resume that run (--resume), or remove it."
            )
        self.path.mkdir(parents=True, exist_ok=resume)
        try:
            lock = self.lock.open("ab")
            self.scratch.mkdir(exist_ok=True)
        except OSError:
            if not resume:
                shutil.rmtree(self.path, ignore_errors=True)
            raise
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise ConfigError(f"another run is making '{self.path}'; wait for it, or choose another place.") from error
        return lock

    def _recall(self) -> None:
        if not self.scratch.is_dir():
            raise ConfigError(
                f"process {self.writers.rank} does not see '{self.path}', which another process has made; expected a "
                "directory that all share. Say so (--local-output) if each host has its own."
            )
        if not self._record.exists():
            self._save()
        found = json.loads(self._record.read_text())
        if found["digest"] != self._digest:
            raise ConfigError(
                f"'{self.path}' was begun with other input, options or number of processes, and cannot be resumed with "
                "these. Give it the same again, or remove it."
            )
        self._done = found["steps"] if found["boot"] == self._boot else {}

    def _finish(self) -> None:
        """Move the directory to its place, once it is on the disk.

        Killed before the first record is gone, it is resumed from the records; after that, from the start.
        """
        shutil.rmtree(self.scratch)
        for path in self.path.rglob("*"):
            sync(path)
        for file in (*self.path.glob("progress-*"), self.assignment, self.lock):
            file.unlink(missing_ok=True)
        replaces = self._overwrite and self.target.is_dir() and any(self.target.iterdir())
        if replaces:
            self.target.replace(self.replaced)
        put_in_place(self.path, self.target)
        if replaces:
            self._remove_earlier()

    def _remove_earlier(self) -> None:
        """Remove the files that were there when this began; what others have added since is theirs."""
        folders = {parent for file in self.earlier for parent in file.parents}
        for file in self.earlier:
            with contextlib.suppress(OSError):
                (self.replaced / file).unlink()
        for folder in sorted(folders, reverse=True):  # the innermost first
            with contextlib.suppress(OSError):
                (self.replaced / folder).rmdir()
        if self.replaced.exists():
            logger.warning("'%s' has what others put into '%s' while it was replaced", self.replaced, self.target)


@contextlib.contextmanager
def staged(
    target: Path, writers: Writers, digest: str, *, resume: bool, overwrite: bool, local: bool
) -> Iterator[Staging]:
    """Make a directory inside the `with` block; when that ends without an error, it is complete and in its place.

    The options are those of `write_partitions`; `local` is `local_output`, and `digest` of everything that decides what
    the result will be. `ConfigError` where the place is taken, what was left there was begun with another digest, or it
    cannot be made there; `PartitionError` where the disk is full.
    """
    target = target.resolve() if target.is_symlink() else Path(os.path.abspath(target))
    staging = Staging(target, writers, digest, overwrite)
    _check_free(staging, resume, overwrite)
    staging.leads = writers.lowest_rank_with(f"{socket.gethostname() if local else ''}:{target}") == writers.rank
    with contextlib.ExitStack() as stack:
        if staging.leads:
            with _disk_explained(staging.path):
                stack.enter_context(staging._begin(resume))
        writers.all(True)  # from here on a failure removes it
        try:
            with _disk_explained(staging.path):
                staging._recall()
                writers.all(True)  # all have seen it, before one that fails removes it
                yield staging
                writers.all(True)
                if staging.leads:
                    staging._finish()
                writers.all(True)
        except BaseException as error:
            removed = isinstance(error, FileNotFoundError) and not staging.lock.exists()
            if not resume:
                staging.lock.unlink(missing_ok=True)
                shutil.rmtree(staging.path, ignore_errors=True)
            if removed:
                writers.all(True)  # raises why another process has failed, which then removed what was there
            raise


def _check_free(staging: Staging, resume: bool, overwrite: bool) -> None:
    target = staging.target
    if target.is_dir():
        names = sorted(file.name for file in target.iterdir())
        if names and not overwrite:
            done = " If the run that was to be resumed has made it, it is complete." if resume else ""
            raise ConfigError(
                f"'{target}' already holds {_some(names)}, and nothing is overwritten unless asked (--overwrite); name "
                f"another directory.{done}"
            )
        if names:
            staging.earlier = _own_files(target)
        if target.is_mount():
            raise ConfigError(f"'{target}' is a mount point, which cannot be replaced; name a directory inside it.")
    elif target.exists():
        raise ConfigError(f"'{target}' is a file; name a directory that does not exist or is empty.")
    if overwrite and staging.replaced.exists():
        raise ConfigError(
            f"'{staging.replaced}' is there: a run that was killed while it replaced '{target}' has left it, or one in "
            "which others put files there. Move it back or elsewhere, or remove it."
        )


def _own_files(target: Path) -> set[Path]:
    """The files in a directory, relative to it; refuses to replace anything but what partitioners write."""
    try:
        spec = read_partition_json(target)
    except PartitionError as error:
        raise ConfigError(f"'{target}' is overwritten only where it holds partitions. {error}") from error
    written = {Path(os.path.relpath(file, target)) for files in spec.files for file in files.values()}
    written |= {file.with_name(SUMS) for file in written} | {Path(spec.path.name), Path("report.json")}
    folders = {parent for file in written for parent in file.parents}
    there = {path.relative_to(target) for path in target.rglob("*")} - folders
    if others := sorted(map(str, there - written)):
        raise ConfigError(
            f"'{target}' is not overwritten, as it holds {_some(others)} beside partitions; move that elsewhere."
        )
    return there


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
            "now. Free some, or name a directory elsewhere; --resume keeps what is done and goes on later."
        ) from error
