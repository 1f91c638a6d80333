"""Random combinations of features on workers equal one machine, outputs and all gradients, or raise where it does.

    python -m tests.combinations.test_combinations 123        # runs case 123 alone, and says what is wrong

Each case takes one value of each of `cases.AXES`: workers, modes, settings, graphs, precisions, calls and training
steps. In double precision numbers agree within 1e-9 of the largest, in single precision within 2e-4 and in bfloat16
within 8 %.

- "2 in turns": workers share a process and run one after the other, with their tensors in a file between turns.
- "beside", "behind": a second call takes the same inputs as the first, or its output.
- "weights changed", "inputs changed": between forward and backward. Torch's error is expected, or gradients of the
  forward's values.
- "second derivative": an error is expected.
- "weights made by a function": `torch.func.functional_call`. Layers with Python message functions raise an error, as
  they run again in the backward.

Gradients of maxima that rounding may change are not compared, nor is attention whose scores exceed their precision.
"""

import sys

import pytest

from tests.combinations.cases import ALL, AXES, QUICK, cases
from tests.combinations.checks import PROCESSES, problems
from tests.workers import close_shared_pools, end_helper_processes

AT_ONCE = 20


def check(workers, first, last):
    mine = [case for case in cases(last)[first:] if case.workers == workers and case.runs_here]
    wrong = {}
    for k in range(0, len(mine), AT_ONCE):
        wrong |= problems(mine[k : k + AT_ONCE])
    assert not wrong, "\n".join(f"{case}:\n    {why}" for case, why in wrong.items())


@pytest.mark.parametrize("world_size, workers", [(PROCESSES[workers], workers) for workers in AXES["workers"]])
def test_some_combinations(world_size, workers):
    check(workers, 0, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("world_size, workers", [(PROCESSES[workers], workers) for workers in AXES["workers"]])
def test_many_combinations(world_size, workers):
    check(workers, QUICK, ALL)


def main(numbers):
    for number in numbers:
        case = cases(number + 1)[-1]
        print(case, "\n   ", problems([case]).get(case, "right"))
    close_shared_pools()
    end_helper_processes()


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]])
