"""Virtual workers compute what worker processes do: the corners of the matrix that `make test` has.

The matrix itself is all tests of the engine, run with `pytest --virtual WxV`: `make test-virtual`.
"""

import io
import os
import random
import sys
from contextlib import redirect_stdout

import dgl
import numpy as np
import pytest
import torch

import sar
from tests.graphs import partition_in_memory, random_graph
from tests.parity import test_conv_layers as convs
from tests.parity.harness import check, parameter_gradients, random_data, weighted_sum
from tests.parity.programs import largest, pairwise, weighted
from tests.parity.scenarios import SCENARIOS, scattered
from tests.virtual.virtual_pool import VirtualPool
from tests.workers import shared_pool


@pytest.mark.parametrize("name", ["GATConv", "GraphConv both", "SAGEConv lstm", "SAGEConv mean"])
@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("world_size, each", [(1, 5), (2, 2)])
def test_convolutions(world_size, each, fits, name):
    parts = convs.with_in_edges(world_size * each)
    data = convs.random_data(parts, convs.precision_of(name))
    convs.check(VirtualPool(world_size, each, fits=fits), parts, data, [(convs.conv_gradients, (name,))])


def a_sum_and_attention(graph, data):
    """Both have gradients that need the rows of sources again."""
    torch.manual_seed(0)
    layer = dgl.nn.GATConv(6, 3, 2, allow_zero_in_degree=True).double()
    x, w = data.leaf("x"), data.leaf("w")
    out = layer(graph, weighted(graph, x, w)).flatten(1)
    weighted_sum(out, data.nodes["cotangent"]).backward()
    return {"node out": out, "node x.grad": x.grad, "edge w.grad": w.grad, **parameter_gradients(layer)}


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("rounded", ["features", "gradients"])
def test_halves_in_one_direction(rounded, fits):
    """Rows that the forward keeps fit the tiles of the backward."""
    parts, halves = SCENARIOS["random"](2), {f"wire_dtype_{rounded}": torch.bfloat16}
    data = random_data(parts, torch.float64)
    check(VirtualPool(1, 2, fits=fits), parts, data, [(a_sum_and_attention, ())], settings=halves, tolerance=0.03)


def with_a_graph_of_its_own():
    """What a graph of DGL's says after turns of others, which has the addresses of tensors."""
    ends = torch.randint(1000, (2, 20_000))
    graph, wanted = dgl.graph(tuple(ends.clone()), num_nodes=1000), torch.bincount(ends[1], minlength=1000)
    sar.all_sum(torch.ones(1))
    filling = [torch.full((20_000,), -1) for _ in range(20)]
    found = graph.in_degrees()
    del filling
    return [torch.equal(found, wanted)]


def running_statistics(calls):
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(3)
    for _ in range(3):
        norm(torch.randn(9, 3))
        if calls:
            sar.all_sum(torch.ones(1))
    return norm.running_mean, norm.running_var


def test_running_statistics():
    """Torch's operator changes them, and does not say so."""
    mean, var = VirtualPool(1, 2).run(running_statistics, True)[0]
    for found, expected in zip((mean, var), running_statistics(False), strict=True):
        assert torch.allclose(found, expected)


def held_around_calls():
    """Settings of the process that a worker makes for a while."""
    mine, told, stdout = sar.rank() == 0, io.StringIO(), sys.stdout
    with torch.autograd.set_detect_anomaly(mine, check_nan=False), redirect_stdout(told):
        for _ in range(3):
            sar.all_sum(1)
            print(torch.is_anomaly_enabled())
    sar.all_sum(1)
    return told.getvalue().split() == [str(mine)] * 3, not torch.is_anomaly_enabled(), sys.stdout is stdout


def softmax_over_out_edges(graph, data):
    """Logits far from 0, of which the greatest, and not a sum of some, has to be taken off first."""
    logits = (300 * data.edges["e"][:, :2]).requires_grad_()
    edge_softmax = sar.edge_softmax if isinstance(graph, sar.GraphShardManager) else dgl.nn.functional.edge_softmax
    scores = edge_softmax(graph, logits, norm_by="src")
    weighted_sum(scores, data.edges["edge cotangent"]).backward()
    return {"edge scores": scores, "edge logits.grad": logits.grad}


def test_maxima_at_sources():
    parts = SCENARIOS["random"](3)
    check(VirtualPool(1, 3), parts, random_data(parts, torch.float64), [(softmax_over_out_edges, ())])


def random_numbers(calls):
    """Of all generators of a process, with turns of others in between."""
    drawn = []
    for _ in range(3):
        drawn += [torch.rand(()).item(), np.random.rand(), random.random()]  # noqa: NPY002
        if calls:
            sar.all_sum(torch.ones(1))
    return drawn


def test_random_numbers_are_those_of_processes():
    [expected] = shared_pool(1).run(random_numbers, False)
    assert VirtualPool(1, 3).run(random_numbers, True) == [expected] * 3


def on_a_processor_of_its_own():
    allowed = os.sched_getaffinity(0)
    chosen = {sorted(allowed)[sar.rank() % len(allowed)]}
    os.sched_setaffinity(0, chosen)
    for _ in range(3):
        sar.all_sum(0)
    kept = os.sched_getaffinity(0)
    os.sched_setaffinity(0, allowed)
    sar.all_sum(0)
    return kept == chosen, os.sched_getaffinity(0) == allowed


@pytest.mark.parametrize("case", [with_a_graph_of_its_own, held_around_calls, on_a_processor_of_its_own])
def test_what_is_a_worker_s_own(case):
    for found in VirtualPool(1, 3).run(case):
        assert all(found), found


# -- rows that do not fit into memory, laid out for each reader


def with_gradients(graph, data, function):
    x, w = data.leaf("x"), data.leaf("w")
    out = function(graph, x, w)
    weighted_sum(out, data.nodes["cotangent"]).backward()
    of_edges = {} if w.grad is None else {"edge w.grad": w.grad}
    return {"node out": out, "node x.grad": x.grad, **of_edges}


@pytest.mark.parametrize("processes", [1, 2])
def test_rows_that_do_not_fit(processes):
    workers = 3 * processes
    parts = partition_in_memory(random_graph(1, 80, 4000), scattered(80, workers), workers)
    cases = [(with_gradients, (function,)) for function in (weighted, pairwise, largest)]
    cases.append((softmax_over_out_edges, ()))
    check(VirtualPool(processes, 3, fits=False), parts, random_data(parts, torch.float64), cases)
