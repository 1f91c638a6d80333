"""How long the tests of each file take: the longest files come first, so that processes with one queue end together.

`durations.txt` has the seconds of each file in `make test`, as `make durations` measured them on two cores.
"""

from collections import Counter, defaultdict
from pathlib import Path

import pytest

RECORD = Path(__file__).with_name("durations.txt")


class Recorder:
    """A plugin that writes the record anew, from what all processes report."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[_file(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        longest_first = sorted(self._seconds.items(), key=lambda entry: (-entry[1], entry[0]))
        RECORD.write_text("".join(f"{seconds:6.1f} {file}\n" for file, seconds in longest_first))


def longest_files_first(items: list[pytest.Item]) -> None:
    """Sort tests by the recorded seconds of their files; a test of a file without a record counts as an average one."""
    tests = Counter(_file(item.nodeid) for item in items)
    lines = [line.split() for line in RECORD.read_text().splitlines()]
    seconds = {file: float(number) for number, file in lines if file in tests}
    average = sum(seconds.values()) / max(1, sum(tests[file] for file in seconds))
    expected = {file: seconds.get(file, average * number) for file, number in tests.items()}
    items.sort(key=lambda item: (-expected[_file(item.nodeid)], _file(item.nodeid)))


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
