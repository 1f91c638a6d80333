"""`sar examples`: the scripts, copied, and how they begin where there are no data yet."""

from pathlib import Path

import pytest

from sar.cli import main
from tests.python_process import run
from tests.workers import REPOSITORY


def test_a_copy_is_enough_to_begin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine"
    assert main(["examples", str(mine)]) == 0
    assert f"python {mine}/partition_graph.py --parts 2 --out partitions/cora" in capsys.readouterr().out
    scripts = {file.name: file.read_text() for file in mine.glob("*.py")}
    assert scripts == {file.name: file.read_text() for file in (REPOSITORY / "examples").glob("*.py")}
    script = mine / "partition_graph.py"
    done = run(script, "--out", "parts", cwd=tmp_path, timeout=60)
    assert "made a generated graph" in done.stdout, done.stderr
    assert "2,708 nodes" in done.stdout
    again = run(script, "--out", "again", cwd=tmp_path, timeout=60)
    assert again.stdout.startswith("2,708 nodes"), again.stderr
    missing = run(script, "--dataset", "mine.npz", "--out", "none", cwd=tmp_path, timeout=60)
    assert missing.returncode == 1
    assert "mine.npz" in missing.stderr.splitlines()[-1]


def test_no_folder_is_written_to_that_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples", str(tmp_path)]) == 1
    assert "is there already" in capsys.readouterr().err
