"""Run commands in a control group, whose limit of memory includes the page cache. Needs Linux, and root or a group."""

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sar.errors import ConfigError, SarError

CONTROL_GROUPS = Path("/sys/fs/cgroup")
SAMPLE_SECONDS = 0.5
JOIN = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
"""A shell that joins a group and becomes the command."""


@dataclass(frozen=True)
class Taken:
    """Time, memory and bytes read and written by a command and its child processes."""

    status: int  # exit status; negative: killed by that signal
    limit: int  # bytes of memory
    seconds: float
    user: float  # CPU seconds
    system: float
    read: int
    written: int
    disk: int  # peak growth of the used disk space, in bytes
    peak: int  # bytes, page cache included
    samples: list[tuple[float, int, int]]  # seconds since the start, bytes without and with the page cache
    said: list[dict[str, Any]]  # its output, lines of JSON

    @property
    def anonymous(self) -> int:
        """Peak memory without the page cache, in bytes."""
        return max((least for _, least, _ in self.samples), default=0)


def run_limited(command: Sequence[str], limit: int, folder: Path, log: Path, time_limit: float) -> Taken:
    """Run a command in a group of `limit` bytes and in a folder, whose files are dropped from the page cache first.

    Raises:
        ConfigError: as `control_group`.
        SarError: the command takes more than `time_limit` seconds.
    """
    forget(folder)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with control_group(limit) as group, open(log, "w") as output:
        words, samples = ["sh", "-c", JOIN, str(group), *command], list[tuple[float, int, int]]()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the group ends, too
        began, before, disk = time.perf_counter(), _counters(), [shutil.disk_usage(folder).used]
        with subprocess.Popen(words, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT) as process:
            try:
                while process.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(SAMPLE_SECONDS)
                    samples.append((time.perf_counter() - began, *_memory(group)))
                    disk.append(shutil.disk_usage(folder).used)
                    if samples[-1][0] > time_limit:
                        raise SarError(f"{' '.join(command)} takes more than {time_limit:.0f} s.")
            finally:
                _end_all(group)
        peak = next(file for name in ("memory.max_usage_in_bytes", "memory.peak") if (file := group / name).exists())
        counted = [after - then for then, after in zip(before, _counters(), strict=True)]
        user, system, read, written = counted
        said = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        times, moved = (samples[-1][0], user, system), (int(read), int(written))
        grown = max(disk) - disk[0]
        return Taken(process.returncode, limit, *times, *moved, grown, int(peak.read_text()), samples, said)


@contextlib.contextmanager
def control_group(limit: int) -> Iterator[Path]:
    """A control group of `limit` bytes below that of this process, for children to join; removed when they have ended.

    The page cache counts, as on a small machine. Memory that a process has before it joins stays with its old group, so
    the limit covers memory allocated later, and pages of files that the process is the first to read or write.

    Raises:
        ConfigError: there is no memory controller, or this process may not use it.
    """
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    folder = CONTROL_GROUPS / "memory" / own["memory"].lstrip("/") if "memory" in own else None
    parent = folder or CONTROL_GROUPS / own.get("", "").lstrip("/")
    group = parent / f"sar-{threading.get_native_id()}"  # one for each thread
    file = "memory.limit_in_bytes" if "memory" in own else "memory.max"
    try:
        group.mkdir()
    except OSError as error:
        raise ConfigError(f"Cannot make a control group in {parent}: {error.strerror}.") from error
    try:
        if not (group / file).exists():
            raise ConfigError(f"{parent} does not give its groups a controller of memory.")
        (group / file).write_text(str(limit))
        yield group
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM):
            raise
        raise ConfigError(f"Cannot set {file} in {group}: {error.strerror}.") from error
    finally:
        group.rmdir()


def forget(folder: Path) -> None:
    """Remove the files of a folder from the page cache."""
    for file in filter(Path.is_file, folder.rglob("*")):
        opened = os.open(file, os.O_RDONLY)
        os.fsync(opened)
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(opened)


def _end_all(group: Path) -> None:
    """Kill the remaining processes of a group, and wait until it is removed."""
    for _ in range(600):
        left = (group / "cgroup.procs").read_text().split()
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.1)
    raise SarError(f"processes in {group} do not end.")


def _memory(group: Path) -> tuple[int, int]:
    """Bytes of a group, without and with the page cache."""
    lines = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    usage = next(file for name in ("memory.usage_in_bytes", "memory.current") if (file := group / name).exists())
    return int(lines.get("total_rss") or lines["anon"]), int(usage.read_text())


def _counters() -> tuple[float, float, int, int]:
    """CPU seconds of ended children, and bytes read from and written to disk by them and this process."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime, used.ru_stime, *bytes_moved()


def bytes_moved() -> tuple[int, int]:
    """Bytes that this process and its ended children read from and wrote to the disk."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])
