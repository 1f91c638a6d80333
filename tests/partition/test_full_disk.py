"""`sar partition` and `sar chunk` on disks of all sizes that are too small for them."""

import contextlib
import io
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from sar.cli import main
from tests.partition.small_disk import run_on_small_disk
from tests.partition.written import content_of
from tests.stages import without_stages


def run_on_a_growing_disk(disk: str, command: list[str]) -> None:
    """Write a directory with ever more room, from hardly any, until all of it fits."""
    folder = Path(disk)
    rng = np.random.default_rng(0)
    np.savetxt(folder.parent / "edges.csv", rng.integers(0, 2000, (20_000, 2)), "%d", ",")
    np.save(folder.parent / "feat.npy", rng.random((2000, 20)))
    out = folder / "out"
    name, *options = command
    command = [name, str(folder.parent / "edges.csv"), "--undirected", f"--node-feature=feat={folder.parent}/feat.npy"]
    command += [*options, "--out", str(out), "--memory-limit", "40MB"]
    for full, kilobytes in enumerate((*range(8, 200, 64), *range(200, 6000, 800))):
        subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", str(folder)], check=True)
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            status = main(command)
        if status == 0:
            assert full > 3
            content = content_of(out)
            subprocess.run(["rm", "-r", str(out)], check=True)
            assert main(command) == 0
            assert content_of(out) == content
            return
        assert without_stages(said.getvalue()).startswith(f"sar {name}: ")
        assert re.search("the disk of '.*' is full|No space left on device", said.getvalue()), said.getvalue()
        assert os.listdir(folder) == [], kilobytes
    raise AssertionError("it never fitted")


COMMANDS = {
    "random": ["partition", "--parts", "2", "--method", "random"],
    "ldg": ["partition", "--parts", "2", "--method", "ldg"],
    "multilevel": ["partition", "--parts", "2", "--method", "multilevel"],
    "chunk": ["chunk", "--chunks", "2"],
}


@pytest.mark.parametrize(
    "name", ["random", "chunk", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ldg", "multilevel"))]
)
def test_every_full_disk_is_told_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    names = f"{str(tmp_path / 'disk')!r}, {COMMANDS[name]!r}"
    call = f"import tests.partition.test_full_disk as t; t.run_on_a_growing_disk({names})"
    done = run_on_small_disk(tmp_path / "disk", "8k", call)
    assert done.returncode == 0, done.stderr[-3000:]
