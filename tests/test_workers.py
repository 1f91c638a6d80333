"""The worker pool itself: results, errors, deaths, time limits, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing

import pytest
import torch
import torch.distributed as dist

import sar
from tests import leftovers, workers
from tests.workers import Err, Ok, WorkerFailure, WorkerPool

two_workers = pytest.mark.parametrize("world_size", [2])


def describe(mine, factor):
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    return {"rank": dist.get_rank(), "mine": mine * factor, "sum": int(total), "threads": torch.get_num_threads()}


def echo(value):
    return value


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


def start_child():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid


@two_workers
def test_results_come_back_by_rank(pool):
    assert pool.run(describe, 3, per_rank=["a", "b"]) == [
        {"rank": 0, "mine": "aaa", "sum": 3, "threads": 1},
        {"rank": 1, "mine": "bbb", "sum": 3, "threads": 1},
    ]


@two_workers
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 2)])
def test_tensors_travel_unchanged(pool, shape):
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
    values = {str(dtype): (torch.randn(shape) * 2).to(dtype) for dtype in dtypes}
    for back in pool.run(echo, values):
        assert back.keys() == values.keys()
        for name, value in values.items():
            assert back[name].dtype == value.dtype
            assert back[name].shape == value.shape
            assert torch.equal(back[name], value)


def test_a_view_is_pickled_without_its_storage():
    assert len(workers._pickle(torch.arange(1_000_000)[5:7])) < 1000


@two_workers
def test_global_state_is_reset_between_cases(pool):
    fresh = pool.run(read_global_state)
    drawn = pool.run(change_global_state)
    assert pool.run(read_global_state) == fresh
    assert fresh[0] == ((False, sar.Config.comm_buffer_bytes), torch.float32, True, fresh[1][3])
    assert drawn[0] != fresh[0][3], "drawn in another dtype"


@two_workers
def test_an_exception_carries_the_messages_of_all_ranks(pool):
    pids = pool.run(os.getpid)
    with pytest.raises(WorkerFailure) as failure:
        pool.run(raise_on, [0, 1])
    assert "rank 0: KeyError: 'missing on rank 0'" in str(failure.value)
    assert "rank 1: KeyError: 'missing on rank 1'" in str(failure.value)
    assert "in raise_on" in str(failure.value), "the worker's traceback"
    assert set(pool.run(os.getpid)).isdisjoint(pids), "nobody expected it, so the workers are not trusted further"


@two_workers
def test_outcomes_tell_ranks_apart_and_unlike_ends_replace_the_workers(pool):
    pids = pool.run(os.getpid)
    assert [outcome.kind for outcome in pool.outcomes(raise_on, [0, 1])] == ["KeyError", "KeyError"]
    assert pool.run(os.getpid) == pids, "workers that all raised are kept"
    first, second = pool.outcomes(raise_on, [1])
    assert first == Ok(0)
    assert isinstance(second, Err)
    assert second.kind == "KeyError"
    assert second.is_a("LookupError")
    assert not second.is_a("ValueError")
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
def test_a_stopped_worker_is_killed_too(world_size, monkeypatch):
    monkeypatch.setattr(workers, "GRACE", 0.5)
    with closing(WorkerPool(world_size)) as pool:
        outcomes = pool.outcomes(signal_on, [0], signal.SIGSTOP, timeout=1)
        assert [outcome.kind if isinstance(outcome, Err) else "Ok" for outcome in outcomes] == ["Overran", "Ok"]


@two_workers
def test_a_death_fails_the_case_and_the_worker_is_replaced(world_size):
    with closing(WorkerPool(world_size)) as pool:
        pids = pool.run(os.getpid)
        with pytest.raises(WorkerFailure, match=r"rank 0: Died: rank 0 died \(signal 9\)\nlast words"):
            pool.run(signal_on, [0], signal.SIGKILL)
        assert set(pool.run(os.getpid)).isdisjoint(pids)


@two_workers
def test_nothing_is_left_after_close(world_size):
    shared_memory = leftovers.shared_memory()
    directories = leftovers.pool_directories()
    pool = WorkerPool(world_size)
    pids = pool.run(os.getpid)
    assert leftovers.alive(pids) == pids
    assert leftovers.listens(pool.port)
    assert leftovers.pool_directories() > directories
    assert pool.close() == [0, 0], "workers end by themselves"
    assert leftovers.alive(pids) == []
    assert not leftovers.listens(pool.port)
    assert leftovers.pool_directories() == directories
    assert leftovers.abandoned_shared_memory(shared_memory) == []


@two_workers
def test_the_session_check_sees_what_workers_leave(world_size, tmp_path, monkeypatch):
    with closing(WorkerPool(world_size)) as pool:
        children = pool.run(start_child)
    try:
        assert {int(line.split(":")[0]) for line in leftovers.marked_processes()} >= set(children)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path)
    (tmp_path / "forgotten").write_text("x")
    with open(tmp_path / "in_use", "w"):
        assert leftovers.abandoned_shared_memory(set()) == ["forgotten"]


def test_only_importable_functions_are_cases():
    with pytest.raises(ValueError, match="not a top-level function"):
        WorkerPool(2).run(lambda: None)
    with pytest.raises(ValueError, match="1 entries for 2 workers"):
        WorkerPool(2).run(echo, per_rank=["a"])
