"""`sar partition` on disks of all sizes that are too small for it."""

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


def partition_on_a_growing_disk(disk: str, method: str) -> None:
    """Partition with ever more room, from hardly any, until all of it fits; alternately with --resume and without."""
    folder = Path(disk)
    rng = np.random.default_rng(0)
    np.savetxt(folder.parent / "edges.csv", rng.integers(0, 2000, (20_000, 2)), "%d", ",")
    np.save(folder.parent / "feat.npy", rng.random((2000, 20)))
    out = folder / "out"
    options = ["--parts", "2", "--method", method, "--undirected", "--node-feature", f"feat={folder.parent}/feat.npy"]
    command = ["partition", str(folder.parent / "edges.csv"), *options, "--out", str(out), "--memory-limit", "40MB"]
    full = 0
    for kilobytes in (*range(8, 200, 64), *range(200, 6000, 800)):
        subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", str(folder)], check=True)
        for resume in ([], ["--resume"]):
            said = io.StringIO()
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                status = main([*command, *resume])
            if status == 0:
                assert full > 6
                content = content_of(out)
                subprocess.run(["rm", "-r", str(out)], check=True)
                assert main(command) == 0
                assert content_of(out) == content
                return
            full += 1
            assert without_stages(said.getvalue()).startswith("sar partition: ")
            assert re.search("the disk of '.*' is full|No space left on device", said.getvalue()), said.getvalue()
            assert {*os.listdir(folder)} <= ({"out.partial"} if resume else set()), (kilobytes, os.listdir(folder))
        for left in folder.iterdir():
            subprocess.run(["rm", "-r", str(left)], check=True)
    raise AssertionError("it never fitted")


@pytest.mark.parametrize(
    "method", ["random", *(pytest.param(method, marks=pytest.mark.slow) for method in ("ldg", "multilevel"))]
)
def test_every_full_disk_is_told_and_leaves_nothing_but_what_resumes(tmp_path: Path, method: str) -> None:
    names = f"{str(tmp_path / 'disk')!r}, {method!r}"
    call = f"import tests.partition.test_full_disk as t; t.partition_on_a_growing_disk({names})"
    done = run_on_small_disk(tmp_path / "disk", "8k", call)
    assert done.returncode == 0, done.stderr[-3000:]
