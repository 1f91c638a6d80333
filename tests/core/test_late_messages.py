"""Messages that come late: what was not waited for would be computed from whatever the buffer held before."""

import time

import pytest

import sar
from sar.comm.exchange import Exchange
from tests.parity.harness import assert_close, build, deal, merge, random_data, run_program
from tests.parity.programs import weighted
from tests.parity.scenarios import SCENARIOS

LATE = 0.2
"""Seconds between the agreement and what one worker posts."""


def forward_and_backward(graph, data):
    x, w = data.leaf("x"), data.leaf("w")
    out = weighted(graph, x, w)
    (out * data.nodes["y"]).sum().backward()
    return {"node out": out, "node x.grad": x.grad, "edge w.grad": w.grad}


def with_a_late_worker(mine, late, mode):
    partition, data = mine
    graph, post = build(partition, mode), Exchange._post

    def later(self, *args):
        time.sleep(LATE)
        return post(self, *args)

    if sar.rank() == late:
        Exchange._post = later
    try:
        return run_program(forward_and_backward, graph, data)
    finally:
        Exchange._post = post


@pytest.mark.processes("delays the messages of one worker, by a change of a class that threads share")
@pytest.mark.parametrize("mode", [1, 3])
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("world_size", [2])
def test_rows_and_gradients_are_waited_for(pool, world_size, late, mode):
    parts = SCENARIOS["random"](world_size)
    data = random_data(parts)
    found = merge(pool.run(with_a_late_worker, late, mode, per_rank=deal(parts, data)))
    for name, value in run_program(forward_and_backward, parts.reference(), data).items():
        assert_close(found[name], value)
