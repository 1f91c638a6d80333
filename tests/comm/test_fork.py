"""A process that is forked from a worker makes no distributed calls, and leaves the worker's connections alone."""

import multiprocessing
import os
import signal

import dgl.function as fn
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import sar
from tests.comm.launch import free_port, launch
from tests.core.attempts import Failure, catch
from tests.parity.scenarios import SCENARIOS

LIMIT = 20
"""Seconds after which a child is killed, which should raise at once."""


class Summed(Dataset):
    """As a data set whose items take a distributed call."""

    def __len__(self):
        return 1

    def __getitem__(self, item):
        return sar.all_sum(item)


def aggregated(graph):
    with graph.local_scope():
        graph.ndata["h"] = torch.ones(graph.num_nodes(), 2, requires_grad=True)
        graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "out"))
        return graph.ndata["out"]


def in_child(work):
    """What is raised in a forked process."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT)
        writer.send(catch(work))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return reader.recv()


def forked(partition):
    """What each call raises in a child, on all workers but one; and whether the parents compute as before."""
    graph = sar.construct_full_graph(partition)
    out, before = aggregated(graph), aggregated(graph)
    items = DataLoader(Summed(), num_workers=1, multiprocessing_context="fork", timeout=LIMIT)
    found = []
    if sar.rank() != 1:
        for work in (lambda: aggregated(graph), lambda: out.sum().backward(), sar.recover):
            found.append(in_child(work))
        found.append(catch(list, items))
    out.sum().backward()
    assert torch.equal(aggregated(graph), before)
    return found, sar.all_sum(1)


@pytest.mark.parametrize("world_size", [2, 3])
def test_calls_raise_at_once_and_the_parents_go_on(pool, world_size):
    found = pool.run(forked, per_rank=SCENARIOS["random"](world_size).partitions)
    for rank, (failures, total) in enumerate(found):
        assert total == world_size
        assert len(failures) == (0 if rank == 1 else 4)
        for failure in failures:
            assert isinstance(failure, Failure)
            assert failure.kind == "CommunicationError"
            assert "This process was forked from a worker" in failure.message


ENDS = """
import os, sys, signal, sar
sar.initialize_comms()
child = os.fork()
if child == 0:
    signal.alarm(30)
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def test_a_child_that_ends_as_scripts_do():
    """With the interpreter's end, in which gloo would wait for threads that are the parent's."""
    port = str(free_port())
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": "2"}
    reports = launch(ENDS, [place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)])
    assert [report["sum"] for report in reports] == [3.0, 3.0]
