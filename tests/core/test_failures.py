"""Workers that raise, die or stop answering: the others stop with an error that says so, in bounded time."""

import os
import signal
import subprocess
import time
from contextlib import closing

import dgl
import dgl.nn
import pytest
import torch

import sar
from sar.comm.session import current_group
from tests.core.attempts import Failure, catch, fail_on_all_ranks
from tests.graphs import EdgeList, partition_in_memory
from tests.matrix import corner
from tests.parity.harness import build, deal, random_data, random_shares
from tests.parity.programs import pairwise, weighted
from tests.parity.scenarios import SCENARIOS
from tests.workers import Err, Ok, WorkerPool


def graph_with_one_worker_without_in_edges(workers):
    """Node 0 alone has no in-edge; it lies on worker 0."""
    src = torch.arange(12)
    return partition_in_memory(EdgeList(src, (src + 1).clamp(1, 11), 12), src % workers, workers)


def strict_layer(graph, data):
    """DGL's GraphConv raises where it finds a node without in-edges: on worker 0 only."""
    dgl.nn.GraphConv(6, 4).double()(graph, data.nodes["x"])


def own_check_in_local_scope(graph, data):
    with graph.local_scope():
        if sar.rank() == 0:
            raise ValueError("labels of worker 0 are wrong")
        weighted(graph, data.nodes["x"], data.edges["w"])


@pytest.mark.parametrize("mode", [1, 2, 3])
@pytest.mark.parametrize(
    "program, kind, text",
    [
        (strict_layer, "DGLError", "0-in-degree nodes in the graph"),
        (own_check_in_local_scope, "ValueError", "labels of worker 0 are wrong"),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_an_error_inside_local_scope_reaches_everybody(pool, world_size, program, kind, text, mode):
    first, *others = fail_on_all_ranks(pool, graph_with_one_worker_without_in_edges(world_size), program, mode=mode)
    assert first.kind == kind
    assert text in first.message
    for failure in others:
        assert failure.kind == "PeerError", failure
        assert "worker 0 raised" in failure.message.lower(), failure.message
        assert kind in failure.message
        assert text in failure.message


def wrong_width_on_one_rank_within_a_call(graph, data):
    """Operands that do not broadcast, on one rank only."""
    w = data.edges["w"]
    weighted(graph, data.nodes["x"], torch.ones(len(w), 5).double() if sar.rank() == 1 else w)


@pytest.mark.parametrize("world_size", [3])
def test_an_error_inside_a_call_reaches_everybody(pool):
    failures = fail_on_all_ranks(pool, SCENARIOS["random"](3), wrong_width_on_one_rank_within_a_call)
    assert failures[1].kind == "GraphError"
    for failure in (failures[0], failures[2]):
        assert failure.kind in ("PeerError", "DisagreementError"), failure
        assert "worker 1" in failure.message.lower()


def train_until(mine, victim, number, mode, timeout):
    """Train; after three steps the victim gets a signal in the middle of a step."""
    partition, data = mine
    graph = build(partition, mode)
    sar.Config.timeout = timeout
    failure = catch(_steps, graph, data, victim, number)
    second = catch(_steps, graph, data, -1, 0) if failure else None
    return failure, second


def _steps(graph, data, victim, number):
    x, w = data.leaf("x"), data.leaf("w")
    for step in range(6):
        h = pairwise(graph, x, w)
        if step == 3 and sar.rank() == victim:
            os.kill(os.getpid(), number)
        weighted(graph, h, w).sum().backward()


@pytest.mark.parametrize("victim, mode", [(0, 1), (1, 3)])
@pytest.mark.parametrize("world_size", [3])
def test_a_death_is_noticed_by_everybody(world_size, victim, mode):
    """Worker 0 hosts the store, so its death is tested apart. `Config.timeout` is longer than the case may take."""
    with closing(WorkerPool(world_size)) as pool:
        outcomes = pool.outcomes(
            train_until, victim, signal.SIGKILL, mode, 600.0, per_rank=random_shares(world_size), timeout=30
        )
    assert isinstance(outcomes[victim], Err)
    assert outcomes[victim].kind == "Died"
    for rank in {0, 1, 2} - {victim}:
        assert isinstance(outcomes[rank], Ok), outcomes[rank]
        failure, second = outcomes[rank].value
        assert failure.kind == "PeerError", failure
        assert "update_all" in failure.message or "backward" in failure.message, "what it was doing"
        assert second.kind == "PeerError", "a death is final"


def stop_by_a_local_metric(mine, then):
    """Worker 0 leaves the loop by itself; then it calls something else, or ends."""
    partition, data = mine
    graph = build(partition, 1)
    failure = catch(_train_while_it_gets_better, graph, data)
    if failure is None and then == "another call":
        failure = catch(sar.all_sum, 1.0)
    elif failure is None:
        current_group().close()
    return failure


def _train_while_it_gets_better(graph, data):
    x, w = data.leaf("x"), data.leaf("w")
    for epoch in range(4):
        weighted(graph, x, w).sum().backward()
        if sar.rank() == 0 and epoch == 1:
            return


@pytest.mark.parametrize(
    "then, kind, text",
    [
        ("another call", "DisagreementError", "worker 0: all_reduce"),
        ("nothing more", "PeerError", "worker 0: has ended"),
    ],
)
@pytest.mark.parametrize("world_size", [2])
def test_a_worker_that_leaves_its_loop_earlier(world_size, then, kind, text):
    with closing(WorkerPool(world_size)) as pool:
        parts = SCENARIOS["random"](world_size)
        left, stayed = pool.run(stop_by_a_local_metric, then, per_rank=deal(parts, random_data(parts)), timeout=30)
    for failure in (left, stayed) if then == "another call" else (stayed,):
        assert failure.kind == kind
        assert text in failure.message
        assert "Has a worker left its loop earlier, or is a call inside" in failure.message
        assert "sar.EarlyStopping, sar.all_sum" in failure.message


def train_with_a_sleeper(mine, victim, timeout):
    partition, data = mine
    graph = build(partition, 1)
    x, w = data.leaf("x"), data.leaf("w")
    h = pairwise(graph, x, w)
    sar.Config.timeout = timeout  # from here on, as a first call may take longer
    if sar.rank() == victim:
        time.sleep(4 * timeout)
    return catch(lambda: weighted(graph, h, w).sum().backward())


def freeze_one(mine, victim, timeout):
    """Stop the victim's whole process, threads of gloo and of the store included, for a while."""
    partition, data = mine
    graph = build(partition, 1)
    sar.Config.timeout = timeout
    if sar.rank() == victim:
        command = f"sleep {3 * timeout}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", command], stdin=subprocess.DEVNULL, start_new_session=True)
    return catch(_steps, graph, data, victim, signal.SIGSTOP)


@pytest.mark.processes("a virtual worker that sleeps keeps the turn, and a frozen process has all of them")
@pytest.mark.parametrize(
    "program, victim",
    [(train_with_a_sleeper, 0), corner(train_with_a_sleeper, 2), (freeze_one, 0), corner(freeze_one, 1)],
)
@pytest.mark.parametrize("world_size", [3])
def test_a_worker_that_does_not_answer_runs_into_the_timeout(pool, world_size, program, victim):
    failures = pool.run(program, victim, 1.5, per_rank=random_shares(world_size))
    told = [failure for rank, failure in enumerate(failures) if rank != victim or program is freeze_one]
    assert any(failure.kind == "CommunicationTimeout" for failure in told), failures
    for failure in failures:
        assert isinstance(failure, Failure)
        assert failure.kind in ("CommunicationTimeout", "PeerError"), failure
        assert "1.5 s" in failure.message
    assert failures[victim].kind == "PeerError" or program is freeze_one, "it is told when it comes back"
    if program is freeze_one:
        others = [failure for rank, failure in enumerate(failures) if rank != victim]
        assert all(f"for worker {victim} in:" in failure.message for failure in others), others
