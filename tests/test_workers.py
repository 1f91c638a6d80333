"""The worker pool itself: results, errors, deaths, time limits, and nothing left behind."""

import os
import signal
import time
from contextlib import closing

import pytest
import torch
import torch.distributed as dist

import sar
from tests import leftovers
from tests.workers import Err, Ok, WorkerFailure, WorkerPool

two_workers = pytest.mark.parametrize("world_size", [2])


def describe(mine, factor):
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    return {"rank": dist.get_rank(), "mine": mine * factor, "sum": int(total), "threads": torch.get_num_threads()}


def raise_on(ranks):
    if dist.get_rank() in ranks:
        raise KeyError(f"missing on rank {dist.get_rank()}")
    return dist.get_rank()


def sleep_on(ranks):
    if dist.get_rank() in ranks:
        time.sleep(60)
    return os.getpid()


def signal_on(ranks, number):
    if dist.get_rank() in ranks:
        print("last words", flush=True)
        os.kill(os.getpid(), number)
        time.sleep(60)
    return os.getpid()


def change_global_state():
    sar.Config.disable_sr = True
    sar.Config.comm_buffer_bytes = 7
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    return torch.rand(3).tolist()


def read_global_state():
    settings = sar.Config.disable_sr, sar.Config.comm_buffer_bytes
    return settings, torch.get_default_dtype(), torch.is_grad_enabled(), torch.rand(3).tolist()


@two_workers
def test_results_come_back_by_rank(pool):
    assert pool.run(describe, 3, per_rank=["a", "b"]) == [
        {"rank": 0, "mine": "aaa", "sum": 3, "threads": 1},
        {"rank": 1, "mine": "bbb", "sum": 3, "threads": 1},
    ]


@two_workers
def test_global_state_is_reset_between_cases(pool):
    fresh = pool.run(read_global_state)
    drawn = pool.run(change_global_state)
    assert pool.run(read_global_state) == fresh
    assert fresh[0] == ((False, sar.Config.comm_buffer_bytes), torch.float32, True, fresh[1][3])
    assert drawn[0] != fresh[0][3], "drawn in another dtype"


@two_workers
def test_an_exception_carries_the_messages_of_all_ranks(pool):
    with pytest.raises(WorkerFailure) as failure:
        pool.run(raise_on, [0, 1])
    assert "rank 0: KeyError: 'missing on rank 0'" in str(failure.value)
    assert "rank 1: KeyError: 'missing on rank 1'" in str(failure.value)
    assert "in raise_on" in str(failure.value), "the worker's traceback"


@two_workers
def test_outcomes_tell_ranks_apart_and_unlike_ends_replace_the_workers(pool):
    pids = pool.run(os.getpid)
    first, second = pool.outcomes(raise_on, [1])
    assert first == Ok(0)
    assert isinstance(second, Err)
    assert second.kind == "KeyError"
    assert second.is_a("LookupError")
    assert set(pool.run(os.getpid)).isdisjoint(pids)
    assert [result["sum"] for result in pool.run(describe, 1, per_rank=["a", "b"])] == [3, 3], "a fresh process group"


@two_workers
def test_a_worker_that_overruns_is_killed_and_all_are_replaced(world_size):
    with closing(WorkerPool(world_size)) as pool:
        pids = pool.run(os.getpid)
        first, second = pool.outcomes(sleep_on, [1], timeout=1)
        assert first == Ok(pids[0])
        assert second.kind == "Overran"
        assert "in sleep_on" in second.traceback, "where it was"
        assert set(pool.run(os.getpid)).isdisjoint(pids)
        assert leftovers.alive(pids) == []


@two_workers
def test_a_death_fails_the_case_and_the_worker_is_replaced(world_size):
    with closing(WorkerPool(world_size)) as pool:
        pids = pool.run(os.getpid)
        with pytest.raises(WorkerFailure, match=r"rank 0: Died: rank 0 died \(signal 9\)\nlast words"):
            pool.run(signal_on, [0], signal.SIGKILL)
        assert set(pool.run(os.getpid)).isdisjoint(pids)


@two_workers
def test_nothing_is_left_after_close(world_size):
    directories = leftovers.pool_directories()
    pool = WorkerPool(world_size)
    pids = pool.run(os.getpid)
    assert leftovers.alive(pids) == pids
    assert pool.close() == [0, 0], "workers end by themselves"
    assert leftovers.alive(pids) == []
    assert not leftovers.listens(pool.port)
    assert leftovers.pool_directories() == directories
