"""Writes the tables of docs/combinations.md from the cases that passed: a pytest plugin.

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
    """The tables, in Markdown: how many cases have each value, and which pairs of values no case has."""
    pairs = Counter(frozenset(pair) for case in right for pair in set(case.pairs()))
    counts = Counter(value for case in right for value in {value for _, value in case.values()})
    axes = {axis: [value for value in values if value != PLAIN] for axis, values in AXES.items() if axis != "second"}
    several = sum(count > 1 for count in pairs.values())
    text = f"{len(right)} cases with {len(pairs)} pairs of values, of which {several} are in several cases.\n\n"
    text += "| axis | values | cases of each |\n| --- | --- | --- |\n"
    for axis, values in axes.items():
        of_each = [counts[value] for value in values]
        text += f"| {axis} | {'; '.join(values)} | {min(of_each)} to {max(of_each)} |\n"
    absent: dict[str, list[str]] = {}
    for k, values in enumerate(axes.values()):
        later = [value for others in list(axes.values())[k + 1 :] for value in others]
        for value in values:
            if others := [other for other in later if frozenset((value, other)) not in pairs]:
                absent.setdefault("; ".join(others), []).append(value)
    text += "\n| value | in no case with |\n| --- | --- |\n"
    text += "".join(f"| {'; '.join(values)} | {others} |\n" for others, values in absent.items())
    return text
