"""Parses sizes of memory, and measures the memory of this process and this machine."""

import contextlib
import ctypes
import gc
import os
import re
import resource
import threading
from pathlib import Path

from sar.errors import ConfigError

_LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_CONTROL_GROUPS, _OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def parse_bytes(text: str) -> int:
    """Parse 8GiB (powers of 1024), 500MB or 500M (powers of 1000), or 500B. A number without a unit is rejected."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?=[KMGTB])([KMGT]?)(i)?B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ConfigError(f"{text!r} is not a size; expected a number and a unit, such as 8GiB or 500MB")
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[unit.upper()])


def anonymous_memory(process: int | str = "self") -> int:
    """Bytes of a process's resident memory that do not belong to files; 0 if the process has ended."""
    try:
        _, resident, of_files, *_ = Path(f"/proc/{process}/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(of_files)) * os.sysconf("SC_PAGE_SIZE")


class PeakAnonymous:
    """The peak of a process's `anonymous_memory`, sampled by a thread."""

    def __init__(self, process: int | str = "self") -> None:
        self.baseline = self.peak = anonymous_memory(process)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, args=(process,), daemon=True)
        self._thread.start()

    def _sample(self, process: int | str) -> None:
        while not self._end.wait(0.005):
            self.peak = max(self.peak, anonymous_memory(process))

    def above_baseline(self) -> int:
        """Bytes of the peak above the level at construction; ends the thread."""
        self._end.set()
        self._thread.join()
        return self.peak - self.baseline


def machine_memory() -> int:
    """Bytes of memory of this machine, or the limit of its container."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # there is none, or it says "max"
            most = min(most, int(Path(file).read_text()))
    return most


def available_memory() -> int:
    """Bytes still available to this process, on the machine and in its control groups; page cache counts as free."""
    free = [_numbers(Path("/proc/meminfo"))["MemAvailable:"] * 1024]
    with contextlib.suppress(OSError):
        of = dict(line.split(":", 2)[1:] for line in _OWN_GROUP.read_text().splitlines())
        top = _CONTROL_GROUPS / ("memory" if "memory" in of else "")
        own = top / of.get("memory", of.get("", "")).lstrip("/")
        for group in {own, *own.parents, top}:
            with contextlib.suppress(OSError, KeyError, ValueError):  # there is none, or it says "max"
                usage = _numbers(group / "memory.stat")
                if "total_rss" in usage:  # the first version of control groups
                    free.append(usage["hierarchical_memory_limit"] - usage["total_rss"])
                else:
                    free.append(int((group / "memory.max").read_text()) - usage["anon"])
    return max(min(free), 0)


def _numbers(file: Path) -> dict[str, int]:
    """The number in each line of a file, by the name before it."""
    return {words[0]: int(words[1]) for words in map(str.split, file.read_text().splitlines())}


class PeakMemory:
    """Measures how far resident memory rises above its level at construction.

    The kernel's high-water mark is reset first. If that is not allowed, the mark of the whole process is used, and
    an earlier peak may hide a later one: use a fresh process per measurement.
    """

    def __init__(self) -> None:
        gc.collect()
        # glibc only: return freed blocks, so they count again when they are reused.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        self.restart()
        self.baseline = _resident("VmRSS")  # that level, in bytes

    def restart(self) -> None:
        """Reset the peak, but not the baseline of `above_baseline`."""
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def above_baseline(self) -> int:
        """Peak resident memory since construction or `restart`, minus that at construction, in bytes."""
        return max(0, _resident("VmHWM") - self.baseline)


def _resident(field: str) -> int:
    """Bytes of resident memory: VmRSS (current) or VmHWM (peak); without /proc, the peak for both."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
