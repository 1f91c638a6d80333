"""Whatever goes wrong in one virtual worker ends all of them with a clear error, at once, and leaves nothing behind."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import sar
from sar.comm import session
from sar.errors import ConfigError
from sar.outofcore.residency import Residency
from sar.outofcore.spill import SpillFile
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
