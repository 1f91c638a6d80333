"""What a test finds on a page: its code blocks, in order, and what its comments say about them.

A block is a fence with a language. Comments, which readers do not see, stand before the block that they are about:

    <!-- test: workers=2 files=graph
    x = torch.rand(5)                 code that readers need not see, run where it stands
    assert "sound" in said            `said`: what the last commands printed
    -->
    <!-- test: not run: needs Slurm -->

`workers=` or `files=` begin a new run: new processes, a new folder with these files (`files.py`), nothing known. `slow`
leaves the rest of the run to `make test-all`. A block with a title, such as ```` ```python title="train.py" ````, is a
file of that name and is not run by itself. Of a `diff` the new side is meant.
"""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.workers import REPOSITORY

PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    *(page for page in sorted((REPOSITORY / "docs").rglob("*.md"))),
]

RUNS = ("python", "sh", "console", "diff")
"""Languages that are run; of others (`text`, `toml`) nothing is asked."""

_TOKEN = re.compile(
    r"^[ ]*<!--\ test:[ ]*(?P<note>[^\n]*?)[ ]*(?:\n(?P<hidden>.*?))?-->"
    r"|^(?P<fence>[ ]*```+)(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=fence)[ ]*$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One block: `why_not` is set where it is not run, `title` where it is a file."""

    language: str
    code: str
    line: int
    """The first of its lines on the page."""
    title: str = ""
    why_not: str = ""


@dataclass
class Run:
    """Blocks that are run one after the other, in the same processes and the same folder."""

    page: Path
    line: int
    workers: int = 1
    files: tuple[str, ...] = ()
    blocks: list[Block] = field(default_factory=list)
    quick: int | None = None
    """How many of the blocks come before what is slow; None: nothing is."""

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"


def new_side(diff: str) -> str:
    """The file after the change."""
    return "".join(f"{line[1:]}\n" for line in diff.splitlines() if not line.startswith(("-", "@")))


def old_side(diff: str) -> str:
    """The file before it."""
    return "".join(f"{line[1:]}\n" for line in diff.splitlines() if not line.startswith(("+", "@")))


def runs_of(page: Path, text: str) -> Iterator[Run]:
    """The runs of a page; ValueError where a comment or a fence is not understood."""
    run = Run(page, 1)
    why_not = ""
    for token in _TOKEN.finditer(text):
        line = text.count("\n", 0, token.start()) + 1
        if token["fence"] is None:
            note = token["note"]
            if note.startswith("not run: "):
                why_not = note.removeprefix("not run: ")
            elif note == "slow":
                run.quick = len(run.blocks)
            elif note:
                if run.blocks:
                    yield run
                run = _new_run(page, line, note)
            if token["hidden"]:
                run.blocks.append(Block("python", textwrap.dedent(token["hidden"]), line + 1))
            continue
        language, _, options = token["info"].strip().partition(" ")
        if not language:
            raise ValueError(f"{page.name}:{line}: a block without a language")
        code = textwrap.dedent(token["code"])
        title = re.search(r'title="([^"]+)"', options)
        run.blocks.append(Block(language, code, line + 1, title[1] if title else "", why_not))
        why_not = ""
    if run.blocks:
        yield run


def _new_run(page: Path, line: int, note: str) -> Run:
    run = Run(page, line)
    for word in note.split():
        key, _, value = word.partition("=")
        if key == "workers" and value.isdigit():
            run.workers = int(value)
        elif key == "files" and value:
            run.files = tuple(value.split(","))
        elif word == "slow":
            run.quick = 0
        else:
            raise ValueError(f"{page.name}:{line}: the comment says {word!r}, which is not known")
    return run
