"""Whatever goes wrong in one virtual worker ends all of them with a clear error, at once, and leaves nothing behind."""

import errno
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import sar
from sar.comm import session
from sar.errors import ConfigError, SpillError
from sar.outofcore import workers
from sar.outofcore.residency import Residency
from sar.outofcore.spill import Disk, SpillFile
from sar.outofcore.turns import Turns
from sar.outofcore.workers import WorkerThreads
from tests.core.attempts import catch
from tests.virtual.virtual_pool import VirtualPool
from tests.workers import Err

PLACES = 3


def outcomes_of(case, *args, processes=1, timeout=30):
    pool = VirtualPool(processes, PLACES)
    began = time.monotonic()
    outcomes = pool.outcomes(case, *args, timeout=timeout)
    assert time.monotonic() - began < timeout
    assert all(isinstance(outcome, Err) for outcome in outcomes), outcomes
    return outcomes


def together():
    return sar.all_sum(torch.ones(20_000))


def calls_in_a_thread_of_its_own():
    thread = threading.Thread(target=catch, args=(together,))
    thread.start()
    thread.join()
    together()


def test_threads_make_no_calls():
    for outcome in outcomes_of(calls_in_a_thread_of_its_own):
        assert "A thread that worker 0 has started makes a distributed call" in outcome.message


def takes_a_profile():
    with torch.profiler.profile():
        together()


REFUSED = {
    "torch.compile": lambda: torch.compile(torch.nn.Linear(2, 2)),
    "DistributedDataParallel": lambda: torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2)),
    "signal.signal": lambda: signal.signal(signal.SIGTERM, lambda *_: None),
    "torch.profiler": takes_a_profile,
}


def uses(feature):
    together()
    REFUSED[feature]()


@pytest.mark.parametrize("feature", REFUSED)
def test_features_that_are_refused(feature):
    before = torch.compile
    told = [outcome.message for outcome in outcomes_of(uses, feature)]
    assert any(message.startswith(f"{feature} cannot run in workers that share a process") for message in told), told
    assert torch.compile is before


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


def test_a_gpu_is_refused(tmp_path):
    file = SpillFile(tmp_path, Disk(1e9))
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
        SpillFile(Path("/dev/shm"), Disk(1e9))
    with pytest.raises(ConfigError, match="no/such/folder"):
        SpillFile(Path("no/such/folder"), Disk(1e9))


def test_a_spill_file_has_no_name(tmp_path):
    file = SpillFile(tmp_path, Disk(1e9))
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


def space(*files):
    """Bytes that files have on the disk."""
    return sum(os.fstat(file.fd).st_blocks * 512 for file in files)


def test_space_of_free_slots_goes_to_slots_of_other_sizes(tmp_path):
    disk, (most, step) = Disk(1e9), (0, 2**20)
    files = [SpillFile(tmp_path, disk) for _ in range(2)]
    for pages in (3, 5, 7, 3):
        slots = [file.slot(pages * step) for file in files for _ in range(105 // pages)]
        assert len({(slot.file, slot.begin) for slot in slots}) == len(slots)
        most = max(most, sum(slot.room for slot in slots))
        assert sum(slot.room for slot in slots) <= space(*files) <= 1.27 * most
        del slots
    for file in files:
        file.close()


def test_a_disk_takes_back_the_space_of_free_slots_before_it_is_full(tmp_path, monkeypatch):
    file, reserve, limit = SpillFile(tmp_path, Disk(1e9)), os.posix_fallocate, 40 * 2**20

    def fallocate(fd, begin, nbytes):
        if space(file) + nbytes > limit:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(fd, begin, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    slots = [file.slot(3 * 2**20) for _ in range(10)]
    del slots
    slots = [file.slot(7 * 2**20) for _ in range(5)]
    with pytest.raises(SpillError, match="There is no space"):
        file.slot(7 * 2**20)
    del slots
    assert [file.slot(3 * 2**20).room for _ in range(10)]
    file.close()
