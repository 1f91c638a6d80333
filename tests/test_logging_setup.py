"""Errors that end a script: the sentence first, then the script's own calls."""

import re
import signal
import subprocess
import sys

import pytest

from tests.workers import REPOSITORY

SCRIPT = """
import sar, sys, logging
sar.initialize_comms()
if sys.argv[1:] == ["debug"]:
    sar.logging_setup(logging.DEBUG)
def load():
    sar.load_dgl_partition_data("nowhere", 0, "cpu")
{}
"""


@pytest.mark.parametrize(
    "call, arguments, expected",
    [
        (
            "load()",
            [],
            r"sar\.errors\.PartitionError: Cannot read nowhere .*\nin\n(  File \S*script\.py.*\n +\S.*\n[ ~^]*\n?){2}",
        ),
        ("load()", ["debug"], r"(?s).*Traceback.*load_partition.*PartitionError: Cannot read nowhere .*"),
        ("raise KeyboardInterrupt", [], r"KeyboardInterrupt\nin\n  File \S*script\.py.*\n +raise KeyboardInterrupt\n"),
        ("1 / 0", [], r"Traceback(?s:.*)ZeroDivisionError: division by zero\n"),
    ],
)
def test_errors_that_end_a_script(tmp_path, call, arguments, expected):
    (tmp_path / "script.py").write_text(SCRIPT.format(call))
    command = [sys.executable, tmp_path / "script.py", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    said = done.stderr.replace("[rank0]: ", "")
    assert done.returncode == (-signal.SIGINT if "Keyboard" in call else 1)
    assert re.fullmatch(expected, said), said
