"""The examples pass mypy as users run it; `users_script.py` is what it has to accept strictly."""

import os
import subprocess
import sys

import pytest

from tests.workers import REPOSITORY


@pytest.mark.slow
def test_the_examples_are_well_typed() -> None:
    folder = REPOSITORY / "examples"
    files = [path.name for path in sorted(folder.glob("*.py"))]
    assert len(files) > 5
    # Not strict: models are written without annotations, and DGL has no types.
    command = [sys.executable, "-m", "mypy", "--check-untyped-defs", "--ignore-missing-imports", "--no-error-summary"]
    command += ["--follow-imports=silent", "--config-file=", f"--cache-dir={REPOSITORY / '.mypy_cache' / 'users'}"]
    environment = os.environ | {"MYPYPATH": str(REPOSITORY)}  # sar is found as an installed package would be
    done = subprocess.run(
        [*command, *files], cwd=folder, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.stdout + done.stderr == ""
