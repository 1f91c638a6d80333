"""The lines that `make mutants` breaks, and the tests that must notice, are there."""

import pytest

from tests.workers import REPOSITORY
from tools.mutate import MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_line_and_test_are_there(mutant):
    assert mutant.old in (REPOSITORY / mutant.file).read_text()
    assert mutant.old != mutant.new
    file, _, name = mutant.test.partition("::")
    assert f"def {name.partition('[')[0]}(" in (REPOSITORY / file).read_text()
