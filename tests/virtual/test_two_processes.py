"""What goes wrong in a virtual worker is told to those beside it, and to those of another process by name."""

import os
import resource
import tempfile
import threading
from pathlib import Path

import dgl.function as fn
import pytest
import torch

import sar
from sar.comm import session
from sar.outofcore import workers
from tests.parity.harness import build, random_shares
from tests.parity.programs import weighted
from tests.virtual.virtual_pool import VirtualPool, fill_the_heap
from tests.workers import Err, Ok, shared_pool

VICTIM = 3
"""Of four workers: the last one of its process."""
the_lock = threading.Lock()


def fail_if_victim():
    if sar.rank() == VICTIM:
        raise ZeroDivisionError("mine alone")


def run(mine, case, *options):
    case(mine, *options)
    sar.all_sum(1)  # the failure may have come after what it had to give


def at_once(mine):
    fail_if_victim()


def between_calls(mine):
    sar.all_sum(1)
    fail_if_victim()


def in_a_call(mine):
    sar.all_sum(1)
    if sar.rank() == VICTIM:
        sar.comm.exchange_tensors([torch.ones(1)])


def in_a_hook(mine):
    """The others are out of memory in the middle of their backward."""
    partition, data = mine
    graph, x, w = build(partition, 1), data.leaf("x"), data.leaf("w")
    hidden = weighted(graph, x, w) * 1
    hidden.register_hook(lambda grad: fail_if_victim())
    weighted(graph, hidden, w).sum().backward()


def in_a_message_function(mine, backward):
    partition, data = mine
    graph = build(partition, 1)

    def message(edges):
        m = edges.src["h"].exp()
        if not backward:
            fail_if_victim()
        elif m.requires_grad:
            m.register_hook(lambda grad: fail_if_victim())
        return {"m": m}

    graph.srcdata["h"] = data.leaf("x")
    graph.update_all(message, fn.sum("m", "out"))
    graph.dstdata["out"].sum().backward()


def returns(mine):
    sar.all_sum(1)
    if sar.rank() != VICTIM:
        sar.all_sum(1)


def fills_the_disk(mine):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if sar.rank() == VICTIM:  # alone, as the limit is its process's
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        filling, kept = fill_the_heap(), torch.randn(50_000)  # which has pages of its own, so that it leaves memory
        sar.all_sum(1)
        return kept.sum() + len(filling)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def keeps_a_lock(mine):
    sar.Config.timeout, workers.STALL_SECONDS = 6.0, 0.5
    sar.all_sum(1)
    if sar.rank() >= 2:
        the_lock.acquire()
    try:
        sar.all_sum(1)
    finally:
        if sar.rank() >= 2:
            the_lock.release()


ALONE = f"orker {VICTIM} raised ZeroDivisionError: mine alone"


@pytest.mark.parametrize(
    "case, options, told",
    [
        (at_once, (), ALONE),
        (between_calls, (), ALONE),
        (in_a_call, (), f"orker {VICTIM} raised ConfigError"),
        (in_a_hook, (), ALONE),
        pytest.param(in_a_message_function, (False,), ALONE, marks=pytest.mark.slow),
        pytest.param(in_a_message_function, (True,), ALONE, marks=pytest.mark.slow),
        (returns, (), f"Worker {VICTIM} has ended, while others wait for it"),
        (fills_the_disk, (), "raised SpillError: There is no space in"),
        (keeps_a_lock, (), f"Worker {VICTIM} has the turn, and has not computed for "),
    ],
)
@pytest.mark.parametrize("processes", [1, 2])
def test_failures_are_told(case, options, told, processes):
    pool = VirtualPool(processes, 4 // processes)
    outcomes = pool.outcomes(run, case, *options, per_rank=random_shares(4), timeout=30)
    for rank, outcome in enumerate(outcomes):
        if case is returns and rank == VICTIM:
            assert isinstance(outcome, Ok), outcome
        elif rank == VICTIM and (told == ALONE or case is in_a_call):
            assert outcome.kind == ("ZeroDivisionError" if told == ALONE else "ConfigError"), outcome
        else:
            assert isinstance(outcome, Err), rank
            assert outcome.is_a("SarError"), outcome
            assert told in outcome.message or told.removeprefix("raised SpillError: ") in outcome.message, outcome
            assert case is not keeps_a_lock or "the others wait. Perhaps it waits for a lock" in outcome.message
            assert "(Worker " not in outcome.message  # it is a process that waits for another


def without_a_folder():
    def work(place):
        return sar.all_sum(1)

    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder) / ("missing" if session.rank() else "")
        failures = workers.run_in_turns(2, work, there).failures
        return [str(error) for error in failures.values()], os.listdir(folder)


def test_a_folder_that_one_process_does_not_have():
    first, second = shared_pool(2).outcomes(without_a_folder, timeout=30)
    assert second.kind == "ConfigError"
    told, left = first.value
    assert len(told) == 2
    assert all("Process 1 (workers 2 to 3) raised ConfigError: Cannot use" in one for one in told)
    assert not left
