"""After an error nobody goes on alone: every call raises until all workers have called `sar.recover`."""

import pytest
import torch

import sar
from sar import comm
from sar.comm.session import current_group
from tests.core.attempts import catch, require
from tests.parity.harness import build, deal, random_data
from tests.parity.programs import weighted
from tests.parity.scenarios import SCENARIOS

STEPS = 6
FAILING_STEP = 3


def one_step(graph, data, step, fails):
    """A step whose features and sum tell its number; returns the sum over all workers."""
    x = torch.full_like(data.nodes["x"], step + 1.0).requires_grad_()
    out = weighted(graph, x, data.edges["w"])
    if fails:
        raise ValueError("on purpose")
    out.sum().backward()
    total = out.detach().sum()
    comm.all_reduce(total)
    return total.item()


def train(mine, recover):
    """What each attempt at a step gave: a sum, or the name of the error."""
    partition, data = mine
    graph = build(partition, 1)
    attempts, fails, step = [], sar.rank() == 1, 0
    while step < STEPS:
        try:
            fails_now = fails and step == FAILING_STEP
            fails = fails and not fails_now
            attempts.append((step, one_step(graph, data, step, fails_now)))
            step += 1
        except Exception as error:
            attempts.append((step, f"{type(error).__name__}: {error}"))
            step = sar.recover(step) if recover else step + 1
    return attempts


def run_training(pool, world_size, recover):
    parts = SCENARIOS["random"](world_size)
    data = random_data(parts, torch.float64)
    attempts = pool.run(train, recover, per_rank=deal(parts, data))
    unit = weighted(parts.reference(), torch.ones_like(data.nodes["x"]), data.edges["w"]).sum().item()
    return attempts, [pytest.approx(unit * (step + 1)) for step in range(STEPS)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_workers_repeat_the_step_in_which_one_failed(pool, world_size):
    attempts, expected = run_training(pool, world_size, recover=True)
    for rank, mine in enumerate(attempts):
        assert [step for step, _ in mine] == [0, 1, 2, 3, 3, 4, 5]
        failure = mine[FAILING_STEP][1]
        assert failure.startswith("ValueError" if rank == 1 else "PeerError: Worker 1 raised ValueError"), failure
        assert [value for _, value in mine if not isinstance(value, str)] == expected


@pytest.mark.parametrize("world_size", [2, 3])
def test_nobody_goes_on_without_recovery(pool, world_size):
    attempts, expected = run_training(pool, world_size, recover=False)
    for rank, mine in enumerate(attempts):
        assert [value for _, value in mine[:FAILING_STEP]] == expected[:FAILING_STEP]
        kinds = [failure.partition(":")[0] for _, failure in mine[FAILING_STEP:]]
        first = ["ValueError", "DisagreementError"] if rank == 1 else ["DisagreementError", "CommunicationError"]
        assert kinds == [*first, *["CommunicationError"] * (STEPS - FAILING_STEP - 2)], "worker 1 skips a backward"
        assert "not in the same distributed call" in mine[-1][1], "what stopped it"
        assert "sar.recover" in mine[-1][1]


def recover_without_a_word():
    """Worker 1 fails where the others do not notice; then all meet."""
    if sar.rank() == 1:
        failure = catch(one_step, None, None, 0, True)
        current_group().abort(ValueError(str(failure)))
    step = sar.recover(7 + sar.rank())
    total = torch.ones(1)
    comm.all_reduce(total)
    return step, total.item()


@pytest.mark.parametrize("world_size", [3])
def test_a_worker_that_noticed_nothing_recovers_too(pool):
    assert pool.run(recover_without_a_word) == [(7, 3.0)] * 3
    assert pool.run(sar.recover, per_rank=[5, 4, 6]) == [4] * 3, "also where nobody failed"


def recover_while_another_computes():
    failure = None if sar.rank() == 0 else catch(comm.all_reduce, torch.ones(1))
    return failure, sar.recover(3)


@pytest.mark.parametrize("world_size", [3])
def test_a_call_while_another_worker_recovers(pool):
    results = pool.run(recover_while_another_computes)
    for failure, step in results[1:]:
        assert require(failure).kind == "PeerError"
        assert "Worker 0" in failure.message
        assert "sar.recover(3)" in failure.message
        assert step == 3


def go_on_alone(timeout):
    """Worker 1 makes calls instead of recovering, until the others have given it up."""
    sar.Config.timeout = timeout
    if sar.rank() == 1:
        current_group().abort(ValueError("on purpose"))
        failures = [catch(comm.all_reduce, torch.ones(1)) for _ in range(3)]
        assert current_group()._transport.read_note(current_group().generation + 1, 60) is not None
        return [*failures, catch(sar.recover)]
    return [catch(sar.recover), catch(sar.recover)]


@pytest.mark.processes("a virtual worker that sleeps keeps the turn")
@pytest.mark.parametrize("world_size", [2])
def test_a_worker_that_does_not_recover(pool):
    waited, went_on = pool.run(go_on_alone, 1.5)
    assert [failure.kind for failure in waited] == ["CommunicationTimeout", "PeerError"]
    assert "worker 1 to join" in waited[0].message
    assert "final" in waited[1].message
    assert [failure.kind for failure in went_on] == ["CommunicationError"] * 3 + ["PeerError"]
    assert "ValueError: on purpose" in went_on[0].message
    assert "worker 1 to join" in went_on[-1].message


@pytest.mark.parametrize("world_size", [1])
def test_one_worker_has_nothing_to_recover(pool):
    assert pool.run(sar.recover, per_rank=[5]) == [5]
