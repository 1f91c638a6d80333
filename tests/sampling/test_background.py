"""Background processes: the same batches as without, and errors in bounded time where one of them ends."""

import gc
import os
import signal
import time

import pytest
import torch

import sar
from sar.sampling import background
from tests import leftovers
from tests.parity.blocks import some_seeds
from tests.parity.scenarios import SCENARIOS
from tests.sampling.cases import add_edge_feature, check_blocks, describe, node_features

FANOUTS = [2, 3]


def make_loader(mine, **options):
    partition, seeds = mine
    graph = sar.construct_full_graph(partition)
    add_edge_feature(graph)
    features = node_features(partition)
    sampler = sar.DistNeighborSampler(
        FANOUTS, input_node_features={"x": features}, output_node_features={"y": features}
    )
    return sar.DataLoader(
        graph, seeds, sampler, batch_size=4, shuffle=True, precompute_optimized_batches=False, seed=3, **options
    )


def two_epochs(mine, num_workers):
    loader = make_loader(mine, num_workers=num_workers)
    epochs = [[describe(blocks) for blocks in loader] for _ in range(2)]
    pids = loader._idle.pids if num_workers else []
    del loader
    gc.collect()
    return epochs, leftovers.alive(pids)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_same_batches_with_processes(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    given = list(zip(parts.partitions, some_seeds(parts, "uneven"), strict=True))
    results = [pool.run(two_epochs, number, per_rank=given, timeout=120) for number in (0, 1, 2)]
    for rank in range(world_size):
        here, *others = [by_rank[rank] for by_rank in results]
        for epochs, alive in others:
            assert alive == []
            assert str(epochs) == str(here[0])
        for batches in here[0]:
            for described in batches:
                check_blocks(parts, described, described[-1]["dst"]["_ID"], FANOUTS, False)
        assert str(here[0][0]) != str(here[0][1])


def lose_a_process(mine):
    loader = make_loader(mine, num_workers=2)
    batches = iter(loader)
    next(batches)
    children = [int(p.split(":")[0]) for p in leftovers.marked_processes() if f"ppid {os.getpid()}" in p]
    return children


def kill_one(mine):
    started = []
    original = background._Process.__init__

    def remember(self, number):
        original(self, number)
        started.append(self.process.pid)

    background._Process.__init__ = remember
    try:
        loader = make_loader(mine, num_workers=2, prefetch_factor=1)
        began = None
        try:
            for number, _ in enumerate(loader):
                if number == 1:
                    began = time.monotonic()
                    if sar.rank() == 0:
                        os.kill(started[1], signal.SIGKILL)
            raise AssertionError("the loader went on")
        except sar.SarError as error:
            return type(error).__name__, str(error), time.monotonic() - began, leftovers.alive(started)
    finally:
        background._Process.__init__ = original


@pytest.mark.parametrize("world_size", [1, 2])
def test_dead_process_is_an_error_everywhere(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    given = list(zip(parts.partitions, some_seeds(parts, "all"), strict=True))
    outcomes = pool.run(kill_one, per_rank=given, timeout=120)
    for kind, message, seconds, alive in outcomes:
        assert kind in ("SamplingError", "PeerError")
        assert seconds < 30
        assert alive == []
        assert "process" in message
    assert outcomes[0][0] == "SamplingError"
    assert "signal 9" in outcomes[0][1]
