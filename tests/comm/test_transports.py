"""Transports without processes: connections of each generation, and workers that share a process."""

import os
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sar.comm import process_transport
from sar.comm.exchange import Exchange
from sar.comm.group import Group
from sar.comm.process_transport import ProcessTransport
from sar.comm.rows import BufferPool, RowFormat
from sar.comm.statistics import BACKWARD
from sar.comm.tiles import GradientReturn, HaloPlan, Layout, LocalFields, Settings
from sar.comm.transport import Failure, Transport
from sar.errors import CommunicationError
from sar.outofcore import progress
from sar.outofcore.transport import InProcessTransport
from sar.outofcore.turns import Turns
from sar.outofcore.workers import WorkerThreads
from tests.comm.simulated import Network, SimulatedTransport
from tests.comm.test_order import CPU, NODES, add, check_totals, random_plans, run_all


class Generations(SimulatedTransport):
    """A worker's end of another network in each generation."""

    def __init__(self, networks: list[Network], store: dist.Store, rank: int) -> None:
        super().__init__(networks[0], store, rank)
        self.networks = networks

    def connect(self, group: Any, limit: float) -> None:
        ProcessTransport.connect(self, group, limit)

    def _connect(self) -> None:
        self.network = self.networks[self._generation]


@pytest.mark.parametrize("workers", [2, 3])
def test_after_an_error_all_go_on_over_new_connections(workers: int) -> None:
    store, networks = dist.HashStore(), [Network(workers, seed, in_order=False) for seed in range(3)]

    def work(rank: int) -> tuple[list[str], list[int], bool]:
        group, told, steps = Group(Generations(networks, store, rank)), [], []
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


def in_turns(workers: int, work: Callable[[int, Group], Any]) -> WorkerThreads:
    """Run `work(rank, group)` as workers that share this process."""
    turns, process = Turns(workers, 0), Group(Transport(0, 1))
    threads = WorkerThreads(turns, lambda rank: work(rank, Group(InProcessTransport(process, turns, rank))))
    threads.run()
    return threads


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("workers, tile_rows", [(2, 1), (3, 4), (5, 64)])
def test_rows_and_gradients_within_a_process(workers: int, tile_rows: int, in_place: bool) -> None:
    plans = random_plans(workers, seed=workers)
    x = [torch.arange(NODES, dtype=torch.float64).unsqueeze(1) + 1000 * p for p in range(workers)]
    everywhere = [torch.cat(plan.send_rows) for plan in plans]

    def work(rank: int, group: Group) -> torch.Tensor:
        assert list(group.local_peers) == list(range(workers))
        plan = HaloPlan(rank, plans[rank].send_rows, torch.tensor(plans[rank].halo_counts), NODES, everywhere)
        settings = Settings(1, 2**20, tile_rows, False, None, None)
        layout = Layout.of(plan, settings, RowFormat.of([x[rank]]))
        total = torch.zeros(NODES, 1, dtype=torch.float64)
        for fetch, give in ((True, False), (True, True), (False, True)):
            group.agree("a call")
            fields, returns = [x[rank]] if fetch else None, GradientReturn([total], add) if give else None
            local = LocalFields() if in_place else None
            exchange = Exchange(
                *(group, plan, settings, layout, BufferPool(CPU), "a call", CPU), fields, local=local, returns=returns
            )
            for halo, rows, grads, sources in exchange.tiles():
                if halo is None:  # the own edges' turn
                    continue
                assert (sources is not None) == in_place
                index = plans[halo.owner].send_rows[rank][halo.begin : halo.end]
                if fetch:
                    assert torch.equal(rows[0][index] if in_place else rows[0], x[halo.owner][index])
                if give:
                    rows = index if in_place else torch.arange(halo.end - halo.begin)
                    add(rows, x[halo.owner][index] * (rank + 1), grads[0])
        return total

    threads = in_turns(workers, work)
    assert not threads.failures
    check_totals(threads.results, plans, x)


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


class Layer(nn.Module):
    def forward(self, group: Group, call: str) -> None:
        with group.guard():
            group.agree(call)
            group.share([], [], call)


@pytest.mark.parametrize("on_a_terminal", [False, True])
def test_progress(on_a_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "BAR_SECONDS", 0.0)
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda _: on_a_terminal)

    def work(rank: int, group: Group) -> None:
        layer = Layer()
        with group.guard():
            group.agree("constructing the graph with nodes")
        for _ in range(2):
            layer(group, "update_all, sum")
            number = group.call_id
            for call in (f"{BACKWARD}update_all, sum; call {number}", "gather_grads", "all_sum of float32[1]"):
                with group.guard():
                    group.agree(call)

    assert not in_turns(2, work).failures
    forward = "Layer forward, sending rows", "Layer forward", "Layer backward, sending rows"
    epoch = [f"sar: {step}: {n} of 2" for step in forward for n in (1, 2)]
    expected = [f"sar: {step}: {n} of 2" for step in ("loading", "structure") for n in (1, 2)] + epoch
    told = capsys.readouterr().err
    if not on_a_terminal:
        assert told.splitlines() == [*expected, "sar: gather_grads: 1 of 2"]  # of the first epoch
        return
    epoch_end = ["sar: gather_grads: 1 of 2", "sar: gather_grads: 2 of 2", "", ""]  # the script's own lines may follow
    states = [state.partition(" |")[0] for state in told.split("\r\x1b[K")]
    assert states == ["", *expected, *epoch_end, *epoch, *epoch_end]
    assert "\n" not in told
    assert "1 of 2 |##########          |" in told
