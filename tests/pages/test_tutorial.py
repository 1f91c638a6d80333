"""The port in the tutorial is a short one, and of the very script that the page shows before; all is run elsewhere."""

import difflib

from tests.pages.blocks import new_side, old_side, runs_of
from tests.workers import REPOSITORY


def changed_lines(before: str, after: str) -> int:
    """Lines that are removed or written, of those that replace each other the more."""
    blocks = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False).get_opcodes()
    return sum(max(i - h, k - j) for kind, h, i, j, k in blocks if kind != "equal")


def test_the_port_changes_fewer_than_15_lines_of_the_script_before_it() -> None:
    page = REPOSITORY / "docs" / "tutorial.md"
    files = {block.title: block for run in runs_of(page, page.read_text()) for block in run.blocks if block.title}
    port, before = files["train.py"], files["dgl_train.py"].code
    assert old_side(port.code) == before
    changed = changed_lines(before, new_side(port.code))
    assert changed < 15
    assert f"{changed} changed lines" in page.read_text()
