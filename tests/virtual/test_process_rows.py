"""Exchanges of workers that share a process, in place and in letters, without a script; and what tells of progress."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sar.comm.exchange import Exchange
from sar.comm.group import Group
from sar.comm.rows import RowFormat
from sar.comm.statistics import BACKWARD
from sar.comm.tiles import GradientReturn, HaloPlan, Layout, LocalFields, Settings
from sar.comm.transport import Transport
from sar.outofcore import progress
from sar.outofcore.transport import InProcessTransport
from sar.outofcore.turns import Turns
from sar.outofcore.workers import WorkerThreads
from tests.comm.test_order import CPU, NODES, add, check_totals, random_plans


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
            exchange = Exchange(*(group, plan, settings, layout, "a call", CPU), fields, local=local, returns=returns)
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
