"""Writes the table of docs/layers.md from what passed: a pytest plugin.

    python -m pytest -p tests.parity.layer_table tests/parity/test_conv_layers.py

The tests record, as properties of their reports, the layer and each way it ran and was right. A way counts as running
where every test of the layer recorded it. The rest of the page is written by hand.
"""

import platform
from collections import defaultdict
from collections.abc import Collection, Mapping
from importlib.metadata import version

import pytest

import sar  # noqa: F401  before anything imports dgl
from tests.parity.conv_layers import CONVS, NEEDS_PATCH, REGISTRY, TAKES_BLOCKS, among, layer_of
from tests.workers import REPOSITORY

PAGE = REPOSITORY / "docs" / "layers.md"
BEGIN, END = "<!-- written by tests/parity/layer_table.py -->\n", "<!-- end -->\n"
WAYS = ("mode 1", "mode 2", "mode 3", "MFG")

_recorded: dict[str, list[set[str]]] = defaultdict(list)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what one test has recorded, also where it failed after some of the ways."""
    layers = [str(value) for key, value in report.user_properties if key == "layer"]
    if report.when == "call" and layers:
        _recorded[layers[0]].append({str(value) for key, value in report.user_properties if key == "runs"})


def pytest_sessionfinish() -> None:
    """Replace the written part of the page, unless some layer was not tested."""
    if missing := REGISTRY.keys() - _recorded.keys():
        absent = sorted({layer_of(name) for name in missing - CONVS.keys()})
        pytest.exit(f"{PAGE} stays as it is: {len(missing)} cases were not run; this DGL lacks {absent}.", returncode=1)
    ran = {name: set.intersection(*by_test) for name, by_test in _recorded.items()}
    versions = ", ".join(f"{name} {version(name)}" for name in ("dgl", "torch", "numba"))
    made = f"Made with {versions} and Python {platform.python_version()}, on two and three workers.\n\n"
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{made}{table(ran)}{END}{rest.split(END)[1]}")


def table(ran: Mapping[str, Collection[str]]) -> str:
    """The table, in Markdown, of the ways in which each case ran."""
    rows = [("layer", "options", "`patch_dgl`", *WAYS)]
    last = ""
    for name in REGISTRY:
        layer, _, options = name.partition(" ")
        cells = ["yes" if way in ran[name] else "no" for way in WAYS]
        if not among(TAKES_BLOCKS, name):
            cells[-1] = "-"
        rows.append((layer if layer != last else "", options, "yes" if among(NEEDS_PATCH, name) else "", *cells))
        last = layer
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [f"| {' | '.join(c.ljust(n) for c, n in zip(row, widths, strict=True))} |\n" for row in rows]
    lines.insert(1, f"|{'|'.join('-' * (width + 2) for width in widths)}|\n")
    return "".join(lines)
