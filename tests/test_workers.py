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
from tests.workers import Ok, WorkerFailure, WorkerPool

two_workers = pytest.mark.parametrize("world_size", [2])


def describe(mine, factor):
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    return {"rank": dist.get_rank(), "mine": mine * factor, "sum": int(total), "threads": torch.get_num_threads()}


def raise_on(ranks):
    if dist.get_rank() in ranks:
        raise KeyError(f"missing on rank {dist.get_rank()}")
    return dist.get_rank()


def end_on_one(how):
    if dist.get_rank() == 1:
        print("last words", flush=True)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    return os.getpid()


def change_global_state():
    sar.Config.comm_buffer_bytes = 7
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    return torch.rand(3).tolist()


def read_global_state():
    return sar.Config.comm_buffer_bytes, torch.get_default_dtype(), torch.is_grad_enabled(), torch.rand(3).tolist()


@two_workers
def test_global_state_is_reset_between_cases(pool):
    fresh = pool.run(read_global_state)
    assert pool.run(change_global_state)[0] != fresh[0][3], "drawn in another dtype"
    assert pool.run(read_global_state) == fresh


@two_workers
def test_errors_are_told_by_rank_and_unlike_ends_replace_the_workers(pool):
    pids = pool.run(os.getpid)
    first, second = pool.outcomes(raise_on, [1])
    assert first == Ok(0)
    assert second.kind == "KeyError"
    assert second.is_a("LookupError")
    assert "in raise_on" in second.traceback
    assert set(pool.run(os.getpid)).isdisjoint(pids)
    expected = [{"rank": rank, "mine": mine * 3, "sum": 3, "threads": 1} for rank, mine in enumerate("ab")]
    assert pool.run(describe, 3, per_rank=["a", "b"]) == expected, "in a fresh process group"


@two_workers
@pytest.mark.parametrize(
    "how, words",
    [("killed", r"rank 1: Died: rank 1 died \(signal 9\)\nlast words"), ("late", r"(?s)Overran.*in end_on")],
)
def test_workers_that_end_early_or_late_are_replaced_and_nothing_is_left(world_size, how, words):
    directories = leftovers.pool_directories()
    with closing(WorkerPool(world_size)) as pool:
        pids = pool.run(os.getpid)
        with pytest.raises(WorkerFailure, match=words):
            pool.run(end_on_one, how, timeout=60 if how == "killed" else 1)
        assert leftovers.alive(pids) == []
        assert set(pool.run(os.getpid)).isdisjoint(pids)
        assert pool.close() == [0, 0], "workers end by themselves"
        assert not leftovers.listens(pool.port)
    assert leftovers.pool_directories() == directories
