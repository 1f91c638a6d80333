"""A call that only one worker makes, or makes of other things than the rest, says what happened."""

import os

import dgl
import pytest
import torch
from torch import nn

import sar
from tests.core.attempts import assert_disagreement, catch
from tests.parity.scenarios import SCENARIOS


def call_in_a_forked_process():
    """What a distributed call says in a child of worker 0, and what the workers compute afterwards."""
    sar.all_sum(1)
    told = ""
    if sar.rank() == 0:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, str(catch(sar.all_sum, 1)).encode())
            os._exit(0)
        os.close(write)
        told = os.read(read, 10_000).decode()
        os.waitpid(child, 0)
    return told, [sar.all_sum(1) for _ in range(3)]


@pytest.mark.processes("forks one")
@pytest.mark.parametrize("world_size", [2])
def test_a_forked_process_makes_no_calls(pool, world_size):
    (told, first), (_, second) = pool.run(call_in_a_forked_process)
    assert "This process was forked from a worker" in told
    assert first == second == [2, 2, 2]


def partition_on_one_worker(folder):
    def work():
        if sar.rank() == 0:
            sar.partition_graph(dgl.rand_graph(10, 20), "graph", 2, folder)
        sar.all_sum(1)

    return catch(work)


@pytest.mark.parametrize("world_size", [2])
def test_partitioning_is_for_all_workers(pool, world_size, tmp_path):
    assert_disagreement(pool.run(partition_on_one_worker, str(tmp_path / "parts")), "which all workers do together")


def parameter_of_own_nodes():
    model = nn.Module()
    model.mask = nn.Parameter(torch.ones(sar.rank() + 1))
    model.mask.sum().backward()
    return catch(sar.gather_grads, model)


@pytest.mark.parametrize("world_size", [2])
def test_parameters_of_own_nodes(pool, world_size):
    assert_disagreement(pool.run(parameter_of_own_nodes), "row for each of a worker's own nodes")


def change_on_one_worker(partition):
    """Whether each batch has the features as they were when it was asked for; worker 1 changes its own at the first."""
    graph = sar.construct_full_graph(partition)
    x = torch.ones(graph.num_nodes(), 2)
    loader = sar.DataLoader(graph, graph.node_ids()[:4], sar.DistNeighborSampler([2], input_node_features={"x": x}))
    right = []
    for number, blocks in enumerate(loader):
        changed = blocks[0].srcdata[dgl.NID] >= graph.node_ranges[1][0]
        right.append(bool((blocks[0].srcdata["x"][:, 0] == 1 + (changed & (number > 0))).all()))
        if number == 0 and sar.rank() == 1:
            x.add_(1)
        sar.all_sum(0)
    return right


@pytest.mark.parametrize("world_size", [2])
def test_features_that_one_worker_changes(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    assert pool.run(change_on_one_worker, per_rank=parts.partitions) == [[True] * 4] * 2
