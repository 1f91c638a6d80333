"""Random combinations of features on workers equal one machine, outputs and all gradients, or raise where it does.

Each case takes one value of each axis of `cases.py`. Results must agree within 1e-9 of the largest number in double
precision, 2e-4 in single precision and 8 % in bfloat16. A second derivative, and inputs or weights that change between
forward and backward, may raise an error. Not compared are gradients of maxima that rounding may change, and attention
whose scores exceed their precision.

    python -m tests.combinations.test_combinations 123        # runs case 123 alone, and says what is wrong
"""

import sys

import pytest

from tests.combinations.cases import ALL, AXES, QUICK, cases
from tests.combinations.checks import PROCESSES, problems
from tests.workers import close_shared_pools, end_helper_processes

AT_ONCE = 20


@pytest.mark.parametrize("first, last", [(0, QUICK), pytest.param(QUICK, ALL, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size, workers", [(PROCESSES[workers], workers) for workers in AXES["workers"]])
def test_combinations(world_size, workers, first, last):
    mine = [case for case in cases(last)[first:] if case.workers == workers and case.runs_here]
    wrong = {}
    for k in range(0, len(mine), AT_ONCE):
        wrong |= problems(mine[k : k + AT_ONCE])
    assert not wrong, "\n".join(f"{case}:\n    {why}" for case, why in wrong.items())


def main(numbers):
    for number in numbers:
        case = cases(number + 1)[-1]
        print(case, "\n   ", problems([case]).get(case, "right"))
    close_shared_pools()
    end_helper_processes()


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]])
