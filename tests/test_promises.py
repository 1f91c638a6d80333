"""`docs/promises.md` names a test for every promise; the tests are there."""

import re

from tests.workers import REPOSITORY

PAGE = REPOSITORY / "docs" / "promises.md"
TEST = re.compile(r"\[`(test_\w+)`\]\(\.\./(tests/[\w/]+\.py)\)")


def test_every_promise_has_a_test_that_is_there():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    promises = [row for row in rows if not row.startswith("| promise")]
    assert len(promises) > 30
    for promise in promises:
        tests = TEST.findall(promise)
        assert tests, promise
        for name, file in tests:
            assert f"\ndef {name}(" in (REPOSITORY / file).read_text(), (name, file)
