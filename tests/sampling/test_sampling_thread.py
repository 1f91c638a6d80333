"""Batches that a thread samples ahead: the same as without, and errors in bounded time if one fails or leaves."""

import itertools
import os
import signal
import threading
import time

import pytest
import torch

import sar
from sar.comm import session
from sar.sampling import loader as loader_module
from sar.sampling.batch import draw_batch
from tests.comm.launch import free_port, launch
from tests.core.attempts import catch_and_recover, require
from tests.matrix import THREAD, corner
from tests.parity.blocks import some_seeds
from tests.parity.scenarios import SCENARIOS
from tests.sampling.cases import add_edge_feature, check_blocks, describe, node_features, same

pytestmark = THREAD

FANOUTS = [2, 3]


def make_loader(mine, batch_size=4, **options):
    partition, seeds = mine
    graph = sar.construct_full_graph(partition)
    add_edge_feature(graph)
    features = node_features(partition)
    sampler = sar.DistNeighborSampler(
        FANOUTS, input_node_features={"x": features}, output_node_features={"y": features}
    )
    return sar.DataLoader(graph, seeds, sampler, batch_size, shuffle=True, seed=3, **options)


@pytest.fixture
def given(world_size):
    parts = SCENARIOS["random"](world_size)
    return parts, list(zip(parts.partitions, some_seeds(parts, "uneven"), strict=True))


def two_epochs_and_a_half(mine, num_workers):
    """Two epochs, a third that is left, and a fourth; and whether threads are left when the loader is gone."""
    loader = make_loader(mine, num_workers=num_workers)
    epochs = [[describe(blocks) for blocks in loader] for _ in range(2)]
    for _ in loader:
        break
    epochs.append([describe(blocks) for blocks in loader])
    length = len(loader)
    del loader
    return epochs, threads_left(), length


def threads_left():
    """Sampling threads that are still there after a while."""
    deadline = time.monotonic() + 20
    while (left := [t.name for t in threading.enumerate() if t.name == "sar-sampling"]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@pytest.mark.parametrize("world_size", [1, 2, corner(3)])
def test_same_batches_with_a_thread(pool, given):
    parts, mine = given
    without = pool.run(two_epochs_and_a_half, 0, per_rank=mine)
    for number in (1, 3):
        for (epochs, left, _), (expected, _, _) in zip(
            pool.run(two_epochs_and_a_half, number, per_rank=mine), without, strict=True
        ):
            assert left == []
            assert same(epochs, expected)
    for (epochs, _, length), (_, seeds) in zip(without, mine, strict=True):
        assert not same(epochs[0], epochs[1])
        for batches in epochs:
            assert len(batches) == length
            chosen = [described[-1]["dst"]["_ID"] for described in batches]
            assert torch.equal(torch.cat(chosen).sort().values, seeds.sort().values)
            for described, ids in zip(batches, chosen, strict=True):
                check_blocks(parts, described, ids, FANOUTS, False)


def several_loops(mine):
    """Batches of two loops over one loader at a time, with other calls between; and sums of these calls.

    Before, worker 1 fails where the others start their threads.
    """

    def fail():
        loader = make_loader(mine, num_workers=1)
        assert sar.rank() == 0, "on purpose"
        next(iter(loader))

    assert catch_and_recover(fail) is not None
    expected, loader = [describe(blocks) for blocks in make_loader(mine)], make_loader(mine, num_workers=2)
    loops, sums = ([], []), []
    for both in zip(loader, loader, strict=True):
        for found, blocks in zip(loops, both, strict=True):
            found.append(describe(blocks))
        sums.append(sar.all_sum(sar.rank() + 1))
        next(iter(make_loader(mine, num_workers=1)))
    return expected, loops[0], sums


@pytest.mark.parametrize("world_size", [2])
def test_loops_and_calls_at_a_time(pool, given):
    for expected, found, sums in pool.run(several_loops, per_rank=given[1]):
        assert same(found, expected)
        assert sums == [3] * len(expected) != []


def leave_every_epoch(mine):
    """Leave each loop early on worker 1 alone, without another call in between."""

    def run():
        for _ in range(3):
            for number, _ in enumerate(loader, 1):
                if number == 2 - sar.rank():
                    break

    loader = make_loader(mine, 1)
    return catch_and_recover(run), len(loader)


@pytest.mark.parametrize("world_size", [2])
def test_a_worker_that_begins_the_next_epoch_alone_is_an_error_at_once(pool, given):
    for failure, batches in pool.run(leave_every_epoch, per_rank=given[1]):
        assert batches > 2
        assert "a batch, 1 of epoch 0" in failure.message
        assert "a batch, 0 of epoch 1" in failure.message


def leave(mine, steps):
    """Leave a loop after so many batches, and make another call; then all go on with a whole epoch."""

    def run():
        for number, _ in enumerate(loader, 1):
            if number == steps[sar.rank()]:
                break
        sar.all_sum(1)

    loader, began = make_loader(mine, 1, num_workers=2), time.monotonic()
    failure = catch_and_recover(run)
    return failure, len(list(loader)), len(loader), time.monotonic() - began


@pytest.mark.parametrize("world_size", [2])
def test_a_worker_that_leaves_its_loop_alone_is_an_error_everywhere(pool, given):
    found = pool.run(leave, [1, None], per_rank=given[1])
    assert require(found[1][0]).kind == "DisagreementError"
    assert "Workers [0] have left the loop" in found[1][0].message
    for failure, batches, length, seconds in found:
        assert failure is not None
        assert batches == length > 4
        assert seconds < 20


def fail_in_thread(mine):
    """The third batch of worker 1 fails; what is raised, how many batches came before, and how many later."""
    loader, batches, calls = make_loader(mine, 1, num_workers=2), [], itertools.count()

    def failing(*args):
        if sar.rank() == 1 and next(calls) == 2:
            raise ValueError("on purpose")
        return draw_batch(*args)

    def run():
        for blocks in loader:
            batches.append(blocks)
            sar.all_sum(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_module, "draw_batch", failing)
        failure = catch_and_recover(run)
    return failure, len(batches), len(list(loader)), len(loader)


@pytest.mark.parametrize("world_size", [2])
def test_an_error_in_a_thread_is_raised_in_all_loops(pool, given):
    found = pool.run(fail_in_thread, per_rank=given[1])
    assert require(found[1][0]).kind == "ValueError"
    assert require(found[0][0]).kind == "PeerError"
    assert "Worker 1 raised ValueError: on purpose" in found[0][0].message
    for _, before, later, length in found:
        assert before == 2
        assert later == length


def die_in_an_epoch(mine, num_workers):
    """Worker 0 is killed in the middle of an epoch; how the other ends, and whether that is final."""
    loader = make_loader(mine, num_workers=num_workers)
    try:
        for _ in loader:
            began = time.monotonic()
            if sar.rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    except sar.SarError as error:
        return type(error).__name__, time.monotonic() - began, session.current_group().final


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("world_size", [2])
def test_dead_worker_in_an_epoch(pool, given, num_workers):
    first, second = pool.outcomes(die_in_an_epoch, num_workers, per_rank=given[1])
    assert first.kind == "Died"
    kind, seconds, final = second.value
    assert kind == "PeerError"
    assert seconds < 60
    assert final


ENDS_IN_A_LOOP = """
import torch
import sar
from tests.sampling.scenes import parts_of
sar.initialize_comms()
graph = sar.construct_full_graph(parts_of([200, 200]).partitions[sar.rank()])
x = torch.ones(graph.num_nodes(), 1000)
sampler = sar.DistNeighborSampler([3], input_node_features={"x": x})
batches = iter(sar.DataLoader(graph, graph.node_ids(), sampler, 4, num_workers=3))
next(batches)
"""


def test_a_script_that_ends_in_a_loop_exits():
    """Its iterator is alive until the interpreter ends."""
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    reports = launch(ENDS_IN_A_LOOP, [place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)])
    assert [report["sum"] for report in reports] == [3, 3]
