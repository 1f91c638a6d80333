"""A control group of Linux with little memory, in which page cache counts, too: what a small machine would be."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sar.errors import ConfigError

ROOT = Path("/sys/fs/cgroup")


@contextmanager
def control_group(megabytes: int) -> Iterator[Path]:
    """A group below this process's own, for children to join; gone at the end, when they must have ended.

    What a process has had before it joins stays with the group that it was in. So the limit is on what it takes later:
    memory of its own, and pages of files that it is the first to read or write.

    Raises:
        ConfigError: where there is no controller of memory, or this process may not use it.
    """
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    parent = ROOT / "memory" / own["memory"].lstrip("/") if "memory" in own else ROOT / own.get("", "").lstrip("/")
    group, limit = parent / f"sar-{os.getpid()}", "memory.limit_in_bytes" if "memory" in own else "memory.max"
    try:
        group.mkdir()
    except OSError as error:
        raise ConfigError(f"Cannot make a control group in {parent}: {error.strerror}.") from error
    try:
        if not (group / limit).exists():
            raise ConfigError(f"{parent} does not give its groups a controller of memory.")
        (group / limit).write_text(str(megabytes * 2**20))
        yield group
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM):
            raise
        raise ConfigError(f"Cannot set {limit} in {group}: {error.strerror}.") from error
    finally:
        group.rmdir()


def join(group: Path) -> None:
    """Move this process, with all its threads, into a group."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
