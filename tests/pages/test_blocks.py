"""Every code block and command of README and docs does what the page says; see `blocks.py` for how pages say it."""

import atexit
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.pages.blocks import PAGES, RUNS, Block, Run, new_side, runs_of
from tests.pages.files import FILES
from tests.pages.page_processes import PageFailure, PageProcesses

WHY_NOT = {
    "installs",
    "it publishes",
    "needs Kubernetes",
    "needs Slurm",
    "needs a GPU",
    "other tests",
}
"""Why a block may be left out. Each of these is in use, so nothing is left out for a reason that is gone."""

LIMIT = 240.0
"""Seconds for a run."""

SAMPLE = "README.md:"
"""Runs of `make test`; `make test-all` has those of all pages."""

ALL = [run for page in PAGES for run in runs_of(page, page.read_text())]


def cases() -> Iterator[Any]:
    """Each run as far as it is quick, and as a whole where it is not."""
    for run in ALL:
        if run.quick is None or any(not block.why_not for block in run.blocks[: run.quick]):
            marks = () if run.name.startswith(SAMPLE) else pytest.mark.slow
            yield pytest.param(replace(run, blocks=run.blocks[: run.quick]), id=run.name, marks=marks)
        if run.quick is not None:
            yield pytest.param(run, id=f"{run.name}, all", marks=pytest.mark.slow)


@pytest.mark.parametrize("run", list(cases()))
def test_blocks(run: Run, tmp_path: Path) -> None:
    execute(run, tmp_path)


@cache
def made(name: str) -> Path:
    """A folder with files of this name, made once."""
    folder = Path(tempfile.mkdtemp(prefix=f"sar-pages-{name}-"))
    atexit.register(shutil.rmtree, folder)
    FILES[name](folder)
    return folder


def execute(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    for name in run.files:
        shutil.copytree(made(name), folder, symlinks=True, dirs_exist_ok=True)
    processes = PageProcesses(run.workers, folder, LIMIT)
    known: dict[str, Any] = {"said": ""}
    try:
        for block in run.blocks:
            try:
                one(block, run.page, folder, processes, known)
            except PageFailure as failure:
                pytest.fail(f"{run.page}:{block.line}: {failure}", pytrace=False)
        processes.close()
    finally:
        processes.kill()


def one(block: Block, page: Path, folder: Path, processes: PageProcesses, known: dict[str, Any]) -> None:
    """Run one block, write it to its file, or only look whether it could be run."""
    code = new_side(block.code) if block.language == "diff" else block.code
    if block.title:
        (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
        (folder / block.title).write_text(code)
    if block.title or block.why_not:
        parse(block, code)
    elif block.language in ("python", "diff"):
        processes.python(Block("python", code, block.line), page, known)
    elif block.language == "sh":
        known["said"] = processes.commands(code)
    elif block.language == "console":
        known["said"] = console(code, processes)


def parse(block: Block, code: str) -> None:
    """What is not run is at least Python, or shell."""
    if block.language == "python" or block.title.endswith(".py"):
        compile(code, block.title or "block", "exec")
    elif block.language == "sh":
        subprocess.run(["bash", "-n", "-c", code], check=True, timeout=20)


def console(code: str, processes: PageProcesses) -> str:
    """Run the lines after `$`; what is shown below them is what they print, but for numbers. `...` is anything."""
    commands, shown = [], []
    for line in re.sub(r"\\\n(> )?", " ", code).splitlines():
        (commands if line.startswith("$ ") else shown).append(line.removeprefix("$ "))
    said = processes.commands("\n".join(commands))
    plain = [" ".join(re.sub(r"\d+(\.\d+)?", "N", line).split()) for line in said.splitlines()]
    for line in shown:
        expected = " ".join(re.sub(r"\d+(\.\d+)?", "N", line).split())
        if expected not in ("...", "", *plain):
            raise PageFailure(f"the page shows {line!r}, which is not in\n{said}")
    return said


def test_reasons_are_known_and_in_use() -> None:
    used = {block.why_not for run in ALL for block in run.blocks} - {""}
    assert used == WHY_NOT


def test_every_block_of_code_says_its_language() -> None:
    """Of what is not run, none looks like a command or a script."""
    for run in ALL:
        for block in run.blocks:
            if block.language not in RUNS:
                looks = re.search(r"^(\$ )?(sar|python|torchrun|pip|import|from) ", block.code, re.MULTILINE)
                assert not looks or block.language == "markdown", f"{run.page}:{block.line}"
                assert block.language in ("text", "toml", "markdown"), f"{run.page}:{block.line}"
