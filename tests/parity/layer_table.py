"""Writes the table of docs/layers.md from what passed: a pytest plugin.

    python -m pytest -p tests.parity.layer_table tests/parity/test_conv_layers.py

The tests record, as properties of their reports, the layer, the number of workers, and each way the layer ran and was
right. A way counts as running where it is recorded of all numbers of workers. The rest of the page is written by hand.
"""

import platform
from collections import defaultdict
from collections.abc import Collection, Mapping
from importlib.metadata import version
from typing import Any

import pytest

import sar  # noqa: F401  before anything imports dgl
from tests.parity.conv_layers import NEEDS_PATCH, REGISTRY, TAKES_BLOCKS, among
from tests.workers import REPOSITORY

PAGE = REPOSITORY / "docs" / "layers.md"
BEGIN, END = "<!-- written by tests/parity/layer_table.py -->\n", "<!-- end -->\n"
WAYS = ("mode 1", "mode 2", "mode 3", "MFG")

WORKERS = (2, 3)

_recorded: dict[str, dict[int, set[str]]] = defaultdict(dict)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what one test has recorded, also where it failed after some of the ways."""
    recorded: dict[str, list[Any]] = defaultdict(list)
    for key, value in report.user_properties:
        recorded[key].append(value)
    if report.when == "call" and recorded["layer"]:
        _recorded[recorded["layer"][0]].setdefault(recorded["workers"][0], set()).update(recorded["runs"])


def pytest_sessionfinish() -> None:
    """Replace the written part of the page, unless some layer was not tested."""
    if missing := [name for name in REGISTRY if set(_recorded[name]) != set(WORKERS)]:
        pytest.exit(f"{PAGE} stays as it is: {len(missing)} cases were not run, such as {missing[0]}.", returncode=1)
    ran = {name: set.intersection(*_recorded[name].values()) for name in REGISTRY}
    versions = ", ".join(f"{name} {version(name)}" for name in ("dgl", "torch", "numba"))
    made = f"Made with {versions} and Python {platform.python_version()}, on {WORKERS[0]} and {WORKERS[1]} workers.\n\n"
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{made}{table(ran)}{END}{rest.split(END)[1]}")


def table(ran: Mapping[str, Collection[str]]) -> str:
    """The table, in Markdown, of the ways in which each layer ran; its options share a row if they ran alike."""
    options: dict[tuple[str, str, str], list[str]] = {}
    for name in REGISTRY:
        layer, _, option = name.partition(" ")
        modes = ", ".join(way.removeprefix("mode ") for way in WAYS[:-1] if way in ran[name])
        blocks = ("yes" if WAYS[-1] in ran[name] else "no") if among(TAKES_BLOCKS, name) else "-"
        words = (option or "default") + "†" * among(NEEDS_PATCH, name)
        options.setdefault((layer, modes, blocks), []).append(words)
    rows = [(layer, "; ".join(words), modes, blocks) for (layer, modes, blocks), words in options.items()]
    lines = (f"| {' | '.join(row)} |\n" for row in [("layer", "options", "modes", WAYS[-1]), ("---",) * 4, *rows])
    return "".join(lines)
