"""Worker processes: what comes back from them, and that none outlives the call."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sar.errors import CommunicationTimeout, PeerError
from sar.host.processes import WorkerError, run_workers
from tests.matrix import corner


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def add_ranks(report: Callable[[Any], None], start: float) -> tuple[float, int, int]:
    report(("started", os.environ["RANK"]))
    dist.init_process_group("gloo", init_method="env://")
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return total.item(), dist.get_rank(), torch.get_num_threads()


def fail_on_worker_one(report: Callable[[Any], None], how: str) -> None:
    report(os.getpid())
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
    if os.environ["RANK"] != "1":
        store.set("worker 0 has reported", "")
        if how == "echo":
            raise PeerError("worker 1 failed")
        time.sleep(100)
    store.wait(["worker 0 has reported"], timedelta(seconds=30))
    if how == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(7)
    raise ValueError("the cause")


def sleep(report: Callable[[Any], None]) -> None:
    report(os.getpid())
    time.sleep(100)


def test_workers_find_each_other_and_return_by_rank() -> None:
    heard = []
    before = dict(os.environ)
    results = run_workers(add_ranks, 0.5, n_workers=3, n_threads=1, time_limit=60, on_progress=heard.append)
    assert results == [(4.5, rank, 1) for rank in range(3)]
    assert sorted(heard) == [("started", "0"), ("started", "1"), ("started", "2")]
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"(?s)worker 1 failed.*Traceback.*ValueError: the cause$"),
        corner("echo", r"(?s)worker 1 failed.*Traceback.*ValueError: the cause$"),
        ("signal", r"worker 1 died without a traceback \(signal 9, as if memory was short\)"),
        corner("exit", r"worker 1 died without a traceback \(exit status 7\)"),
    ],
)
def test_the_cause_of_a_failure_is_shown_and_nothing_is_left(how: str, message: str) -> None:
    processes: list[int] = []
    with pytest.raises(WorkerError, match=message):
        run_workers(fail_on_worker_one, how, n_workers=2, n_threads=1, time_limit=60, on_progress=processes.append)
    assert len(processes) == 2
    assert not any(alive(process) for process in processes)


def test_workers_that_overrun_their_time_are_killed() -> None:
    processes: list[int] = []
    others = {*multiprocessing.active_children()}  # pools of workers
    with pytest.raises(CommunicationTimeout, match=r"\[0, 1\] did not finish within 8 s"):
        run_workers(sleep, n_workers=2, n_threads=1, time_limit=8, on_progress=processes.append)
    assert not any(alive(process) for process in processes)
    assert {*multiprocessing.active_children()} <= others  # nor those that had no time to report
