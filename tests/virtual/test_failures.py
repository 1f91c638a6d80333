"""Whatever goes wrong in one virtual worker ends all of them with a clear error, at once, and leaves nothing behind."""

import os
import re
import resource
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import sar
from sar.comm import liveness, session
from sar.errors import ConfigError
from sar.outofcore import workers
from sar.outofcore.residency import Residency
from sar.outofcore.spill import SpillFile
from sar.outofcore.turns import Turns
from sar.outofcore.workers import WorkerThreads
from tests.core.attempts import catch
from tests.virtual.virtual_pool import VirtualPool
from tests.workers import Err

PLACES = 3
everybodys: dict[str, object] = {}


def outcomes_of(case, *args, processes=1, timeout=30):
    pool = VirtualPool(processes, PLACES)
    began = time.monotonic()
    outcomes = pool.outcomes(case, *args, timeout=timeout)
    assert time.monotonic() - began < timeout
    assert all(isinstance(outcome, Err) for outcome in outcomes), outcomes
    return outcomes


def together():
    return sar.all_sum(torch.ones(20_000))


def raises(outside_of_calls):
    together()
    if sar.rank() == 1:
        if outside_of_calls:
            raise ZeroDivisionError("mine alone")
        sar.comm.exchange_tensors([torch.ones(1)])
    together()
    together()


@pytest.mark.parametrize("outside_of_calls", [True, False])
def test_an_exception(outside_of_calls):
    outcomes = outcomes_of(raises, outside_of_calls)
    kind = "ZeroDivisionError" if outside_of_calls else "ConfigError"
    assert outcomes[1].kind == kind
    for rank in (0, 2):
        assert outcomes[rank].kind == "PeerError"
        assert f"orker 1 raised {kind}" in outcomes[rank].message


def returns():
    together()
    if sar.rank() != 2:
        together()


def test_an_early_return():
    outcomes = VirtualPool(1, PLACES).outcomes(returns)
    assert outcomes[2].value is None
    for rank in (0, 1):
        assert outcomes[rank].kind == "PeerError"
        assert "Worker 2 has ended, while others wait" in outcomes[rank].message


def calls_another():
    together()
    if sar.rank() == 1:
        sar.sync_params(torch.nn.Linear(2, 2))
    else:
        together()


@pytest.mark.parametrize("processes", [1, 2])
def test_another_call(processes):
    outcomes = outcomes_of(calls_another, processes=processes)
    assert any(outcome.kind == "DisagreementError" for outcome in outcomes)
    told = next(outcome.message for outcome in outcomes if outcome.kind == "DisagreementError")
    assert "worker 0: all_reduce" in told
    assert "worker 1: sync_params" in told


def calls_in_a_thread_of_its_own():
    thread = threading.Thread(target=catch, args=(together,))
    thread.start()
    thread.join()
    together()


def test_threads_make_no_calls():
    for outcome in outcomes_of(calls_in_a_thread_of_its_own):
        assert "A thread that worker 0 has started makes a distributed call" in outcome.message


def compiles():
    together()
    return torch.compile(torch.nn.Linear(2, 2))


def test_compiled_code_is_refused():
    before = torch.compile
    assert any(
        one.message.startswith("torch.compile cannot run in workers that share a process")
        for one in outcomes_of(compiles)
    )
    assert torch.compile is before


def averages():
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))


def test_ddp_is_refused():
    assert "DistributedDataParallel cannot run in workers" in outcomes_of(averages)[0].message


def handles_signals():
    return signal.signal(signal.SIGTERM, lambda *_: None)


def test_handlers_of_signals_are_refused():
    assert "signal.signal cannot run in workers" in outcomes_of(handles_signals)[0].message


def takes_a_profile():
    with torch.profiler.profile():
        together()


def test_profiles_of_torch_are_refused():
    assert "torch.profiler cannot run in workers" in outcomes_of(takes_a_profile)[0].message


def keeps_a_lock(limit):
    sar.Config.timeout = limit
    with everybodys.setdefault("lock", threading.Lock()):
        together()
    return sar.rank()


def keeps_a_lock_with_short_limits(limit):
    workers.STALL_SECONDS = limit / 2
    try:
        return keeps_a_lock(limit)
    finally:
        workers.STALL_SECONDS = liveness.STALL_SECONDS


def test_a_lock_kept_across_a_call():
    """The one who waits for it is left to go on once the other has let go."""
    outcomes = outcomes_of(keeps_a_lock_with_short_limits, 2.0)
    stuck = r"has not computed for \d s; the others wait. Perhaps it waits for a lock"
    assert any(re.search(stuck, outcome.message) for outcome in outcomes)


@pytest.mark.parametrize("lets_go", [True, False])
def test_the_stacks_show_who_waits_for_a_lock(monkeypatch, capsys, lets_go):
    """One that never lets go is left behind."""
    for name, seconds in (("STALL_SECONDS", 0.3), ("GRACE", 0.3 if not lets_go else 10.0)):
        monkeypatch.setattr(workers, name, seconds)
    monkeypatch.setattr(sar.Config, "timeout", 4.0)
    turns, lock = Turns(2, 4), threading.Lock()

    def wants_the_lock(place):
        lock.acquire()
        try:
            turns.meet(place, "a call", None, lambda brought: None, lambda: None)
        finally:
            if lets_go:
                lock.release()

    watched = WorkerThreads(turns, wants_the_lock)
    watched.run()
    assert watched.some_left != lets_go
    assert set(watched.failures) == {0, 1}
    told = capsys.readouterr().err
    assert re.search(r"Worker 5 has the turn, and has not computed for \d s", told)
    first, second = told.rpartition("sar-worker-4:\n")[2].split("sar-worker-5:\n")
    assert "in wants_the_lock\n    turns.meet(" in first
    assert second.endswith("in wants_the_lock\n    lock.acquire()\n\n")
    if not lets_go:
        lock.release()


def fills_the_disk(limit):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        kept = [torch.randn(50_000) for _ in range(10)]
        together()
        return kept
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk():
    outcomes = outcomes_of(fills_the_disk, 1_000_000)
    assert sorted(outcome.kind for outcome in outcomes)[-1] == "SpillError"
    for outcome in outcomes:
        assert "There is no room in" in outcome.message
        assert "more bytes of spilled tensors (File too large)" in outcome.message


def test_a_gpu_is_refused(tmp_path):
    file = SpillFile(tmp_path)
    residency = Residency(file, 1.0)
    with (
        FakeTensorMode(),
        pytest.raises(ConfigError, match="has made a tensor on cuda:0"),
        residency,
    ):
        torch.ones(20_000, device="cuda") + 1
    file.close()


def test_memory_is_no_disk():
    with pytest.raises(ConfigError, match="/dev/shm for spilled tensors is on a tmpfs, which is memory itself"):
        SpillFile(Path("/dev/shm"))
    with pytest.raises(ConfigError, match="no/such/folder"):
        SpillFile(Path("no/such/folder"))


def test_a_spill_file_has_no_name(tmp_path):
    file = SpillFile(tmp_path)
    slot = file.slot(100_000)
    assert not any(tmp_path.iterdir())
    assert os.fstat(file.fd).st_size >= 100_000
    begin = slot.begin
    del slot
    assert file.slot(99_000).begin == begin
    file.close()


def recovers(one_leaves):
    kept = torch.full((20_000,), float(sar.rank()))
    try:
        if sar.rank() == 1:
            with session.current_group().guard():
                raise ValueError("once")
        together()
    except (ValueError, sar.errors.PeerError):
        if one_leaves and sar.rank() == 2:
            return None
        step = sar.recover(7 - sar.rank())
    return step, sar.all_sum(kept)[0].item(), kept.numpy()[-1].item()


@pytest.mark.parametrize("processes", [1, 2])
def test_recovery(processes):
    """All go on from the least step, with the numbers they had."""
    workers = processes * PLACES
    expected = [(8 - workers, sum(range(workers)), rank) for rank in range(workers)]
    assert VirtualPool(processes, PLACES).run(recovers, False) == expected


def test_no_recovery_without_all():
    outcomes = VirtualPool(1, PLACES).outcomes(recovers, True)
    for rank in (0, 1):
        assert outcomes[rank].kind == "PeerError"
        assert "2 has ended" in outcomes[rank].message or "0, 2 have ended" in outcomes[rank].message
        assert "Worker 1 raised ValueError: once" in outcomes[rank].message
