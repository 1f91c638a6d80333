"""Exchanges of up to 64 workers, simulated: each message meets its receive, and nobody waits for ever.

By tag as gloo has it, in any order; and by order as NCCL has it, whose messages begin one batch after the other."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sar.comm import process_transport
from sar.comm.exchange import Exchange
from sar.comm.group import Group
from sar.comm.rows import RowFormat
from sar.comm.tiles import GradientReturn, HaloPlan, Layout, Settings
from sar.errors import CommunicationError
from tests.comm.simulated import Network, SimulatedTransport

NODES, CPU = 40, torch.device("cpu")


def random_plans(workers: int, seed: int) -> list[HaloPlan]:
    """Halo lists of which some are empty, one for each pair."""
    random = torch.Generator().manual_seed(seed)
    lists = [
        [
            torch.arange(NODES)[torch.rand(NODES, generator=random) < torch.rand(1, generator=random) ** 3]
            if q != p
            else torch.arange(0)
            for q in range(workers)
        ]
        for p in range(workers)
    ]
    counts = torch.tensor([[len(rows) for rows in of_worker] for of_worker in lists])
    return [HaloPlan(p, rows, counts, NODES) for p, rows in enumerate(lists)]


def add(rows: Tensor, values: Tensor, total: Tensor) -> None:
    total.index_add_(0, rows, values)


def run_all(workers: int, work: Callable[[int], Any]) -> list[Any]:
    results: list[Any] = [None] * workers

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return results


def check_totals(totals: list[Any], plans: list[HaloPlan], x: list[Tensor]) -> None:
    """Each worker's total is that of two exchanges in which every reader returns the rows, times its number from 1."""
    for plan, own, total in zip(plans, x, totals, strict=True):
        assert isinstance(total, Tensor), total
        expected = torch.zeros(NODES, 1, dtype=torch.float64)
        for reader, rows in enumerate(plan.send_rows):
            add(rows, 2 * own[rows] * (reader + 1), expected)
        assert torch.equal(total, expected)


@pytest.mark.parametrize("in_order", [False, True], ids=["by tag", "by order"])
@pytest.mark.parametrize(
    "workers, depth, tile_rows",  # a depth of None for all at once
    [
        *((workers, *tiles) for workers in (2, 3, 5) for tiles in ((0, 1), (1, 4), (3, 2))),
        *((workers, None, 4) for workers in (2, 5, 16)),
        (16, 1, 64),
        pytest.param(16, 0, 2, marks=pytest.mark.slow),
        pytest.param(64, 2, 32, marks=pytest.mark.slow),
    ],
)
def test_rows_and_gradients_arrive_in_any_order_of_messages(workers, depth, tile_rows, in_order) -> None:
    plans, store = random_plans(workers, seed=workers + (depth or 0)), dist.HashStore()
    network = Network(workers, seed=depth or 7, in_order=in_order)
    x = [torch.arange(NODES, dtype=torch.float64).unsqueeze(1) + 1000 * p for p in range(workers)]

    def work(rank: int) -> Tensor:
        group = Group(SimulatedTransport([network], store, rank))
        settings = Settings(depth or 0, 2**20, tile_rows, False, None, None, depth is None)
        layout = Layout.of(plans[rank], settings, RowFormat.of([x[rank]]))
        total = torch.zeros(NODES, 1, dtype=torch.float64)
        for fetch, give in ((True, False), (True, True), (False, True)):
            group.call_id += 1
            returns = GradientReturn([total], add) if give else None
            exchange = Exchange(
                *(group, plans[rank], settings, layout, "a call", CPU),
                [x[rank]] if fetch else None,
                returns=returns,
            )
            for tile, rows, grads, _ in exchange.tiles():
                if tile is None:  # the own edges' turn
                    continue
                sent = x[tile.owner][plans[tile.owner].send_rows[rank][tile.begin : tile.end]]
                if fetch:
                    assert torch.equal(rows[0], sent)
                if give:
                    grads[0].add_(sent * (rank + 1))
            into = [torch.zeros(plans[p].halo_counts[p][rank], 1, dtype=torch.float64) for p in range(workers)]
            swapped = group.exchange("a call", [x[rank][rows] for rows in plans[rank].send_rows], into)
            for p, rows in enumerate(swapped):
                assert torch.equal(rows, x[p][plans[p].send_rows[rank]])
        network.leave()
        return total

    check_totals(run_all(workers, work), plans, x)


@pytest.mark.parametrize("step", [0, 3, 11])
@pytest.mark.parametrize("workers", [2, 8])
def test_a_worker_that_fails_at_any_step_ends_all(workers, step, monkeypatch) -> None:
    monkeypatch.setattr(process_transport, "PATIENCE", 0.5)
    plans, store = random_plans(workers, seed=7), dist.HashStore()
    network = Network(workers, seed=step, in_order=False)
    posted = 0

    def fail() -> None:
        nonlocal posted
        posted += 1
        if posted > step:
            raise ValueError("on purpose")

    def work(rank: int) -> None:
        group = Group(SimulatedTransport([network], store, rank, fail if rank == 1 else lambda: None))
        settings = Settings(1, 2**20, 2, False, None, None)
        x = torch.zeros(NODES, 1)
        with group.guard():
            layout = Layout.of(plans[rank], settings, RowFormat.of([x]))
            for _ in range(40):
                exchange = Exchange(group, plans[rank], settings, layout, "a call", CPU, [x])
                for _ in exchange.tiles():
                    pass

    ended = run_all(workers, work)
    assert isinstance(ended.pop(1), ValueError)
    for error in ended:
        assert isinstance(error, CommunicationError)
        assert "on purpose" in str(error)


@pytest.mark.parametrize("buffer_bytes", [100, 2**20])
def test_buffers_serve_the_next_exchange(buffer_bytes) -> None:
    """As many as an eighth of the budget holds; fresh ones for each exchange cost page faults."""
    plans, store = random_plans(2, seed=2), dist.HashStore()
    network = Network(2, seed=1, in_order=False)

    def work(rank: int) -> list[set[int]]:
        group = Group(SimulatedTransport([network], store, rank))
        settings, x = Settings(1, buffer_bytes, 4, False, None, None), torch.zeros(NODES, 1)
        layout, kept = Layout.of(plans[rank], settings, RowFormat.of([x])), []
        for _ in range(2):
            group.call_id += 1
            for _ in Exchange(group, plans[rank], settings, layout, "a call", CPU, [x]).tiles():
                pass
            assert group.pool.bytes_kept <= buffer_bytes / 8
            kept.append({buffer.data_ptr() for buffer in group.pool._free})
        network.leave()
        return kept

    for kept in run_all(2, work):
        assert isinstance(kept, list), kept
        assert kept[0] == kept[1]
        assert bool(kept[0]) == (buffer_bytes > 100)
