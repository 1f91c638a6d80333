"""What a test session could leave behind on its machine: processes, entries of /dev/shm, listening ports, files."""

import os
import socket
import tempfile
from pathlib import Path

MARK = "SAR_TEST_SESSION"
"""Environment variable by which our workers, and whatever they start, are known."""

SHARED_MEMORY = Path("/dev/shm")


def mark_session() -> None:
    """Mark every process that this one starts from now on."""
    os.environ[MARK] = str(os.getpid())


def marked_processes() -> list[str]:
    """Living processes started by this session, as "pid: command line", but not this process."""
    mark = f"{MARK}={os.getpid()}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.name != str(os.getpid()) and mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(f"{process.name}: {(process / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()}")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def shared_memory() -> set[str]:
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


def abandoned_shared_memory(before: set[str]) -> list[str]:
    """Entries of /dev/shm that are new and that no living process has mapped or open: other users' are in use."""
    return sorted(name for name in shared_memory() - before if not _in_use(SHARED_MEMORY / name))


def _in_use(path: Path) -> bool:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(path) in (process / "maps").read_text():
                return True
            if any(os.path.realpath(descriptor) == str(path) for descriptor in (process / "fd").iterdir()):
                return True
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return False


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def pool_directories() -> set[Path]:
    """Directories that this session's worker pools made for logs and temporary files."""
    return set(Path(tempfile.gettempdir()).glob(f"sar-workers-{os.getpid()}-*"))
