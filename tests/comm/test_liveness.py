"""Workers that show no sign of life are noticed; workers that are only busy are not."""

import ctypes
import logging
import math
import os
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import sar
from sar import comm
from sar.comm import liveness, store_notes
from sar.comm.session import current_group
from tests.comm.launch import free_port
from tests.core.attempts import catch
from tests.matrix import corner
from tests.python_process import PythonProcess

pytestmark = pytest.mark.processes("watches processes")

BEAT, SILENCE, STALL = 0.2, 4.0, 0.5
LIMIT = 60.0
"""Seconds within which everybody has to know, with signs as quick as these."""

WORKER = """
import os, sys, time, torch, torch.distributed as dist
import sar
from sar.comm import all_reduce, liveness, store_notes
from sar.comm.session import current_group

rank, size, port, own_store = map(int, sys.argv[1:5])
liveness.BEAT_SECONDS, liveness.SILENCE_SECONDS, store_notes.STORE_SECONDS = map(float, sys.argv[5:8])
if own_store:
    sar.initialize_comms(rank, size, "127.0.0.1", master_port_number=port)
else:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    sar.initialize_comms()
began = time.monotonic()
try:
    while True:
        all_reduce(torch.ones(3))
        while current_group().transport.liveness._sign is None:  # of the neighbour, which is watched from then on
            time.sleep(0.02)
        print("a step", flush=True)
        began = time.monotonic()
        time.sleep(0.02)
except sar.SarError as error:
    print(f"{type(error).__name__} after {time.monotonic() - began:.0f} s: {error}", flush=True)
"""


def freeze(size, victim, store_in_worker, *constants, limit=LIMIT):
    """Stop a worker for good in the middle of its work; return what the others say, and how long it takes."""
    port = free_port()
    store = None if store_in_worker else dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    given = port, int(store_in_worker), *constants
    workers = [PythonProcess("-c", WORKER, rank, size, *given, env=environment, merged=True) for rank in range(size)]
    try:
        for worker in workers:
            assert "a step" in worker.line()
        workers[victim].send_signal(signal.SIGSTOP)
        began = time.monotonic()
        said = [worker.communicate(timeout=limit)[0] for rank, worker in enumerate(workers) if rank != victim]
        assert all(worker.returncode == 0 for rank, worker in enumerate(workers) if rank != victim), said
        return said, time.monotonic() - began
    finally:
        del store
        for worker in workers:
            worker.kill()
            worker.communicate()


def assert_named(said, victim):
    for text in said:
        assert "PeerError after" in text, text
        assert f"orker {victim}" in text, text
        assert "frozen" in text, text


@pytest.mark.parametrize(
    "victim, store_in_worker",
    [(0, True), pytest.param(0, False, marks=pytest.mark.slow), pytest.param(1, True, marks=pytest.mark.slow)],
)
def test_a_frozen_worker_is_noticed(victim, store_in_worker):
    said, seconds = freeze(3, victim, store_in_worker, BEAT, SILENCE, 1.0)
    assert_named(said, victim)
    assert seconds > SILENCE / 2, "noticed by something else"


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_frozen_worker_is_noticed_within_three_minutes(victim):
    constants = liveness.BEAT_SECONDS, liveness.SILENCE_SECONDS, store_notes.STORE_SECONDS
    said, _ = freeze(2, victim, True, *constants, limit=180)
    assert_named(said, victim)


def hold_the_lock(seconds):
    """A computation in one thread that lets no other one run."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    sys.setswitchinterval(before)


def with_quick_signs(program):
    """Run with signs of life that are as quick as a test's patience; returns what it raised."""
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in (("BEAT_SECONDS", BEAT), ("SILENCE_SECONDS", SILENCE), ("STALL_SECONDS", STALL)):
            patch.setattr(liveness, name, seconds)
        group = current_group()
        transport = group.transport
        before = transport.liveness
        before.close()
        transport.liveness = liveness.Liveness(group, transport.notes)
        transport.liveness.answers = before.answers
        while transport.liveness._sign in (None, store_notes.LEFT):
            time.sleep(0.01)
        return catch(program)


def busy_for_a_while(in_c):
    def program():
        if sar.rank() == 1 and in_c:
            ctypes.PyDLL(None).usleep(int(2.2 * SILENCE * 1e6))
        elif sar.rank() == 1:
            hold_the_lock(0.6 * SILENCE)
        comm.all_reduce(torch.ones(1))
        comm.all_reduce(torch.ones(1))

    warnings, began = [], time.monotonic()
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    sar.logger.addHandler(handler)
    failure = with_quick_signs(program)
    sar.logger.removeHandler(handler)
    return failure, warnings, time.monotonic() - began


@pytest.mark.parametrize("in_c", [False, True])
@pytest.mark.parametrize("world_size", [2, corner(3)])
def test_a_worker_that_holds_pythons_lock_is_not_given_up(pool, world_size, in_c):
    (failure, warnings, seconds), (other, *_), *_ = pool.run(busy_for_a_while, in_c)
    assert failure is None
    assert other is None
    assert any("worker 0 is waiting for another worker for" in warning for warning in warnings), warnings
    assert any("worker 1: not waiting; its latest call" in warning for warning in warnings), warnings
    assert len(warnings) <= 2 + 2 * math.log2(seconds / STALL), "once per doubling, in each of the two calls"


def threads_after_close():
    group = current_group()
    comm.all_reduce(torch.ones(1))
    before = [thread.name for thread in threading.enumerate()]
    group.close()
    return before, [thread.name for thread in threading.enumerate() if thread.name.startswith("sar-")]


@pytest.mark.parametrize("world_size", [2])
def test_no_thread_outlives_its_group(pool):
    for before, after in pool.run(threads_after_close):
        assert "sar-liveness" in before
        assert after == []
