"""A signal to one worker stops all at the same call, without a message, and training goes on from its checkpoint."""

import os
import signal
from pathlib import Path

import pytest
import torch

import sar
from sar.comm.session import current_group
from sar.host import signals
from tests.workers import WorkerPool

SIGNALLED = 3


def step_of_the_end(number: int) -> tuple[int, list[int]]:
    """The step at which this worker stops, with the calls that the workers had agreed on before and after asking."""
    asked = []
    for step in range(10):
        if step == SIGNALLED and sar.rank() == 1:
            os.kill(os.getpid(), number)
        before, stop = current_group().calls, sar.should_stop()
        asked.append(current_group().calls - before)
        if stop:
            return step, asked
        sar.all_sum(1)
    return -1, asked


@pytest.mark.parametrize("number", signals.ENDING)
def test_all_stop_at_the_call_after_the_next_agreement(number: int) -> None:
    pool = WorkerPool(2)
    try:
        assert pool.run(step_of_the_end, number) == [(SIGNALLED + 1, [0] * (SIGNALLED + 2))] * 2
    finally:
        pool.close()


def test_one_worker_stops_at_once() -> None:
    pool = WorkerPool(1)
    try:
        pool.run(sar.should_stop)
        os.kill(pool.run(os.getpid)[0], signal.SIGTERM)
        assert pool.run(sar.should_stop) == [True]
    finally:
        pool.close()


def status_of_a_forked_process() -> int:
    sar.should_stop()
    child = os.fork()
    if child == 0:
        signal.pause()
    os.kill(child, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_process_still_ends() -> None:
    pool = WorkerPool(1)
    try:
        assert pool.run(status_of_a_forked_process) == [-signal.SIGTERM]
    finally:
        pool.close()
