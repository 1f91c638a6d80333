"""Python calls of one `update_all`: its ten stops, and how many functions of sar it calls on the way."""

import sys
from collections import Counter
from pathlib import Path

import dgl.function as fn
import pytest

import sar
from tests.parity.harness import build, random_shares

PACKAGE = str(Path(sar.__file__).parent) + "/"
MOST = {1: 90, 2: 152}
"""Calls of a forward, by number of workers."""
STOPS = [
    "GraphShardManager.update_all",
    "send_and_reduce",
    "Operation.of",
    "Node.forward",
    "Group.agree",
    "Exchange.__init__",
    "Group.post",
    "aggregate_sum",
    "accumulate_rows",
    "Reduction.finish",
]
"""In their order; `docs/architecture.md` says what each of them does."""


def calls_of_a_forward(mine):
    partition, data = mine
    graph = build(partition, 1)
    graph.ndata["x"] = data.leaf("x")

    def forward():
        graph.update_all(fn.copy_u("x", "m"), fn.sum("m", "out"))

    forward()  # compiles the operation
    calls = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name)

    sys.setprofile(note)
    try:
        forward()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.processes("workers of one process read each other's rows in another way")
@pytest.mark.parametrize("world_size", sorted(MOST))
def test_a_forward_makes_few_python_calls(pool, world_size):
    for calls in pool.run(calls_of_a_forward, per_rank=random_shares(world_size)):
        assert len(calls) <= MOST[world_size], Counter(calls).most_common(40)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="qualified names of code")
@pytest.mark.processes("workers of one process read each other's rows in another way")
@pytest.mark.parametrize("world_size", [2])
def test_the_stops_of_a_forward(pool, world_size):
    for calls in pool.run(calls_of_a_forward, per_rank=random_shares(world_size)):
        assert not set(STOPS) - set(calls)
        assert sorted(STOPS, key=calls.index) == STOPS
