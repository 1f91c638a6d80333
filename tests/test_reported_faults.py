"""Scripts of faults that users met: each prints PASS, or FAIL and what came out instead.

They lie beside the real graphs of the tests. A script that starts its own workers is run as those workers, in processes
that have imported everything.
"""

import os
import re
from pathlib import Path

import pytest

from tests.comm.launch import free_port
from tests.graphs import DATA
from tests.python_process import PythonProcess

SCRIPTS = sorted((DATA.parent / "cases" / "fourth").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_reported_fault_is_mended(script: Path, tmp_path: Path) -> None:
    text = script.read_text()
    own = re.search(r'"--workers", (?:os\.environ\.get\("W", )?"(\d)"', text)
    environments = [{}]
    if own is not None:
        job = {
            "WORLD_SIZE": own[1],
            "LOCAL_WORLD_SIZE": own[1],
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        environments = [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(int(own[1]))]
    processes = [PythonProcess(script, cwd=tmp_path, env=os.environ | more) for more in environments]
    try:
        said = [process.communicate(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    shown = "\n".join(text for pair in said for text in pair)
    assert not re.search(r"^FAIL", shown, re.MULTILINE), shown
    assert re.search(r"^PASS", shown, re.MULTILINE), shown
