"""Writes the tables of docs/combinations.md from what passed: a pytest plugin.

    python -m pytest -p tests.combinations.pair_table tests/combinations

The tests record, as properties of their reports, the cases that were right. The rest of the page is written by hand.
"""

import platform
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version

import pytest

import sar  # noqa: F401  before anything imports dgl
from tests.combinations.cases import ALL, AXES, PLAIN, Case, cases
from tests.workers import REPOSITORY

PAGE = REPOSITORY / "docs" / "combinations.md"
BEGIN, END = "<!-- written by tests/combinations/pair_table.py -->\n", "<!-- end -->\n"
CIRCUMSTANCES = ("inputs", "forward", "between", "backward")
TABLES = (
    (("call",), ("workers", "mode", "dtype", "size")),
    (("call",), ("graph",)),
    (("call",), ("settings", "inputs")),
    (("call",), ("forward",)),
    (("call",), ("between", "backward")),
    (CIRCUMSTANCES, ("workers", "mode", "dtype", "size")),
    (CIRCUMSTANCES, ("graph",)),
    (("settings", "graph"), ("workers", "mode", "dtype", "size")),
)
"""The axes of the rows and of the columns of each table."""

_right: set[int] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep which cases were right."""
    _right.update(int(str(value)) for key, value in report.user_properties if key == "right")


def pytest_sessionfinish() -> None:
    """Replace the written part of the page, unless some case was not right."""
    if missing := [case for case in cases(ALL) if case.number not in _right]:
        pytest.exit(f"{PAGE} stays as it is: {len(missing)} cases did not pass, such as {missing[0]}.", returncode=1)
    versions = ", ".join(f"{name} {version(name)}" for name in ("dgl", "torch_geometric", "torch", "numba"))
    made = f"Made with {versions} and Python {platform.python_version()}.\n\n"
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{made}{tables(cases(ALL))}{END}{rest.split(END)[1]}")


def tables(right: Sequence[Case]) -> str:
    """The tables, in Markdown, of how many cases had each pair."""
    met: Counter[frozenset[str]] = Counter(frozenset(pair) for case in right for pair in set(case.pairs()))
    said = f"{len(right)} cases; {len(met)} pairs, of which {sum(n > 1 for n in met.values())} in several cases.\n"
    calls = Counter(frozenset(case.calls) for case in right if case.second != PLAIN)
    said += f"{len(calls)} of these are pairs of calls, beside each other or one behind the other.\n\n"
    return said + "\n".join(_table(met, rows, columns) for rows, columns in TABLES)


def _table(met: Counter[frozenset[str]], rows: Sequence[str], columns: Sequence[str]) -> str:
    above = [value for axis in columns for value in AXES[axis] if value != PLAIN]
    lines = [[" and ".join(rows), *above]]
    for value in (value for axis in rows for value in AXES[axis] if value != PLAIN):
        lines.append([value, *(str(met[frozenset((value, other))] or "-") for other in above)])
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    text = [f"| {' | '.join(c.ljust(n) for c, n in zip(line, widths, strict=True))} |\n" for line in lines]
    text.insert(1, f"|{'|'.join('-' * (width + 2) for width in widths)}|\n")
    return "".join(text)
