"""A signal to one worker stops all at the same call, without a message, and training goes on from its checkpoint."""

import os
import signal
import time
from pathlib import Path

import pytest

import sar
from sar.comm.session import current_group
from sar.host import signals
from tests import python_process
from tests.workers import WorkerPool

SIGNALLED = 3


def step_of_the_end(number: int) -> tuple[int, list[int]]:
    """The step at which this worker stops, with the calls that the workers had agreed on before and after asking."""
    asked = []
    for step in range(10):
        if step == SIGNALLED and sar.rank() == 1:
            os.kill(os.getpid(), number)
        before, stop = current_group().call_id, sar.should_stop()
        asked.append(current_group().call_id - before)
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
    reads, writes = os.pipe()
    child = os.fork()
    while child == 0:
        os.write(writes, b".")  # Python drops signals that arrive during the fork
        time.sleep(0.01)
    os.read(reads, 1)
    os.kill(child, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_process_still_ends() -> None:
    pool = WorkerPool(1)
    try:
        assert pool.run(status_of_a_forked_process) == [-signal.SIGTERM]
    finally:
        pool.close()


OF_ONE_PROCESS = """
import os, signal, time
import sar
from sar.host.signals import signal_noted

sar.initialize_comms()
assert not sar.should_stop()
while signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # the main thread sets it
    time.sleep(0.01)
for step in range(10):
    if step == 3 and sar.rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        while not signal_noted():
            time.sleep(0.01)
    sar.all_sum(1)
    if sar.should_stop():
        break
print(f"worker {sar.rank()} stops after step {step}")
"""


def test_workers_of_one_process_stop_at_the_same_call(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(OF_ONE_PROCESS)
    environment = os.environ | {"SAR_RESIDENT": "1", "SAR_PARTS": "2", "SAR_SPILL_DIR": str(tmp_path)}
    done = python_process.run(script, env=environment, timeout=60)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (
        0,
        ["worker 0 stops after step 3", "worker 1 stops after step 3"],
    ), done.stderr
