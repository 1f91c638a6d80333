"""Random combinations of features on workers equal one machine, outputs and all gradients, or raise where it does.

    python -m tests.combinations.test_combinations 123        # runs case 123 alone, and says what is wrong

`pair_table.py` makes the tables of docs/combinations.md from what passes here.
"""

import sys

import pytest

from tests.combinations import pair_table
from tests.combinations.cases import ALL, AXES, QUICK, cases
from tests.combinations.checks import PROCESSES, problems
from tests.workers import close_shared_pools, end_helper_processes

AT_ONCE = 20


def check(workers, first, last, record_property):
    mine = [case for case in cases(last)[first:] if case.workers == workers and case.runs_here]
    wrong = {}
    for k in range(0, len(mine), AT_ONCE):
        together = mine[k : k + AT_ONCE]
        found = problems(together)
        for case in together:
            if case not in found:
                record_property("right", case.number)
        wrong |= found
    assert not wrong, "\n".join(f"{case}:\n    {why}" for case, why in wrong.items())


@pytest.mark.parametrize("world_size, workers", [(PROCESSES[workers], workers) for workers in AXES["workers"]])
def test_some_combinations(world_size, workers, record_property):
    check(workers, 0, QUICK, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("world_size, workers", [(PROCESSES[workers], workers) for workers in AXES["workers"]])
def test_many_combinations(world_size, workers, record_property):
    check(workers, QUICK, ALL, record_property)


def test_the_tables_in_the_docs_are_of_these_cases():
    assert pair_table.tables(cases(ALL)) in pair_table.PAGE.read_text(), "see pair_table.py for how to write them"


def main(numbers):
    for number in numbers:
        case = cases(number + 1)[-1]
        print(case, "\n   ", problems([case]).get(case, "right"))
    close_shared_pools()
    end_helper_processes()


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]])
