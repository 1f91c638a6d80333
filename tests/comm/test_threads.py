"""Distributed calls from several threads of one worker: one after the other, or not at all."""

import threading
import time

import pytest
import torch

import sar
from sar import comm
from sar.comm.session import current_group
from tests.core.attempts import Failure, catch, catch_and_recover, require
from tests.parity.harness import assert_close, build, deal, merge, random_data
from tests.parity.programs import weighted
from tests.parity.scenarios import SCENARIOS


def in_thread(function, *args):
    """Start a thread; returns what waits for its result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*args)))
    thread.start()

    def finish():
        thread.join(30)
        return results[0]

    return finish


def overlapping():
    """Worker 0 waits in one thread for the others, and makes another call in a second one."""
    if sar.rank() != 0:
        group = current_group()
        assert group._transport.read_note(group.generation, 60) is not None  # worker 0 has found the clash
        return catch_and_recover(comm.all_reduce, torch.ones(5)), None
    first = in_thread(catch, comm.all_reduce, torch.ones(5))
    while current_group()._owner is None:  # until the thread has begun its call
        time.sleep(0.01)
    second = catch(comm.exchange_tensors, [torch.ones(2)] * sar.world_size())
    failures = first(), second
    sar.recover()
    return failures


@pytest.mark.processes("virtual workers call in one thread")
@pytest.mark.parametrize("world_size", [2])
def test_calls_of_two_threads_that_overlap(pool):
    (first, second), (other, _) = pool.run(overlapping)
    assert require(second).kind == "ConfigError"
    assert "is in all_reduce" in second.message
    assert "calls exchange_tensors" in second.message
    for failure in (first, other):
        assert isinstance(failure, Failure)
        assert "Two threads of worker 0" in failure.message


def one_after_the_other(mine):
    """Forward in one thread, backward in another, as autograd does on CUDA devices, a scope being open."""
    partition, data = mine
    graph = build(partition, 1)
    x, w = data.leaf("x"), data.leaf("w")
    with graph.local_scope():
        out = in_thread(weighted, graph, x, w)()
        in_thread(lambda: (out * out).sum().backward())()
    total = torch.ones(1)
    in_thread(comm.all_reduce, total)()
    return {"node x.grad": x.grad, "edge w.grad": w.grad}, total.item()


@pytest.mark.processes("virtual workers call in one thread")
@pytest.mark.parametrize("world_size", [2])
def test_calls_of_two_threads_in_turn(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    data = random_data(parts, torch.float64)
    results = pool.run(one_after_the_other, per_rank=deal(parts, data))
    x, w = data.leaf("x"), data.leaf("w")
    weighted(parts.reference(), x, w).square().sum().backward()
    actual = merge([grads for grads, _ in results])
    assert_close(actual["node x.grad"], x.grad)
    assert_close(actual["edge w.grad"], w.grad)
    assert [total for _, total in results] == [world_size] * world_size
