"""Control groups of benchmarks: what is beyond their memory ends the process in them, and they go."""

import signal
import subprocess
import sys

import pytest

from benchmarks.limits import control_group
from sar.errors import ConfigError

TAKES = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))  # as `join` does, without imports
bytes({}) + b"x"
"""


def test_a_control_group():
    try:
        with control_group(64) as group:
            statuses = [
                subprocess.run([sys.executable, "-c", TAKES.format(size), str(group)], timeout=60)
                for size in (2**24, 2**27)
            ]
    except ConfigError as refused:
        pytest.skip(str(refused))
    assert [done.returncode for done in statuses] == [0, -signal.SIGKILL]
    assert not group.exists()
