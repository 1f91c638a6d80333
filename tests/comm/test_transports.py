"""Connections of each generation, by gloo and NCCL, without processes."""

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sar.comm import process_transport
from sar.comm.group import Group
from sar.comm.process_transport import ProcessTransport
from sar.comm.transport import Failure
from sar.errors import CommunicationError
from tests.comm.simulated import Network, SimulatedTransport
from tests.comm.test_order import run_all


@pytest.mark.parametrize("workers", [2, 3])
def test_after_an_error_all_go_on_over_new_connections(workers: int) -> None:
    store, networks = dist.HashStore(), [Network(workers, seed, in_order=False) for seed in range(3)]

    def work(rank: int) -> tuple[list[str], list[int], bool]:
        group, told, steps = Group(SimulatedTransport(networks, store, rank)), [], []
        for _ in networks[1:]:
            assert group.agree("a step") == [0] * workers
            try:
                with group.guard():
                    if rank == 1:
                        raise ValueError("on purpose")
                    group.agree("the next step")
            except (ValueError, CommunicationError) as error:
                told.append(str(error))
            steps.append(group.recover(5 + rank))
        last = group._transport.network is networks[-1]
        group.close()
        return told, steps, last

    for told, steps, last in run_all(workers, work):
        assert len(told) == 2
        assert all("on purpose" in text for text in told)
        assert (steps, last) == ([5, 5], True)


def test_nccl_is_made_anew_and_aborted_in_each_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, int]] = []

    class Recorded:
        """In the place of `ProcessGroupNCCL`."""

        def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
            self.number = store.add("made", 1)
            done.append(("new", self.number))

        def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
            """The first operation, which all workers wait for."""
            done.append(("meet", self.number))
            return SimpleNamespace(wait=lambda limit: done.append(("wait", limit.total_seconds())))

        def abort(self) -> None:
            done.append(("abort", self.number))
            raise RuntimeError("the device is gone")

    monkeypatch.setattr(process_transport, "new_nccl", Recorded)
    transport = ProcessTransport(dist.HashStore(), 0, 1, torch.device("meta"))
    for generation in range(2):
        transport._generation = generation
        transport._connect()
        transport._open = True
        transport.abort(generation, Failure("", "on purpose", final=False))
        transport.abort(generation, Failure("", "once more", final=False))  # closed already
    # Each in a store of its own, so each is the first one there.
    met = [("new", 1), ("meet", 1), ("wait", process_transport.CONNECT_TIMEOUT)]
    assert done == [*met, ("abort", 1)] * 2


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="needs Linux's scheduling classes")
@pytest.mark.parametrize("chosen", ["SCHED_OTHER", "SCHED_IDLE"])
def test_threads_of_gloo_preempt_nobody(chosen: str) -> None:
    """And the thread that starts them is as it was; a class that the user has chosen is theirs, too."""
    found: list[set[int]] = []

    def connect() -> None:
        os.sched_setscheduler(0, getattr(os, chosen), os.sched_param(0))
        before = set(os.listdir("/proc/self/task"))
        transport = ProcessTransport(dist.HashStore(), 0, 1)
        transport._connect()
        started = set(os.listdir("/proc/self/task")) - before
        found.append({os.sched_getscheduler(int(thread)) for thread in started})
        found.append({os.sched_getscheduler(0)})
        transport.close()

    thread = threading.Thread(target=connect)
    thread.start()
    thread.join(60)
    expected = os.SCHED_BATCH if chosen == "SCHED_OTHER" else os.SCHED_IDLE
    assert found == [{expected}, {getattr(os, chosen)}]
