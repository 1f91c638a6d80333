"""A disk of a size of one's own: a mount that ends with the process that asked for it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers import REPOSITORY

_MOUNTED = [
    "unshare",
    "--map-root-user",
    "--mount",
    "sh",
    "-ec",
    'mount -t tmpfs -o size="$1" none "$2"; shift 2; exec "$@"',
]


def run_on_small_disk(folder: Path, size: str, call: str) -> subprocess.CompletedProcess[str]:
    """Run Python code, with the names of `tests.partition` modules as it imports them, while `folder` is a small disk.

    Skips the test where this system lets nobody mount.
    """
    folder.mkdir(exist_ok=True)
    mounted = [*_MOUNTED, "sh", size, str(folder)]
    if subprocess.run([*mounted, "true"], capture_output=True, timeout=20).returncode:
        pytest.skip("mounts are not allowed here")
    command = [*mounted, sys.executable, "-W", "ignore", "-c", call]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
