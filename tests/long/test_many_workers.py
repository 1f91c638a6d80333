"""More workers than cores."""

import os

import dgl.nn
import pytest
import torch

import sar
from tests.parity.harness import check, parameter_gradients, random_data, weighted_sum
from tests.sampling.scenes import parts_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WORKERS, CORES, EPOCHS = 8, 2, 5


def trained(graph, data):
    """Logits and gradients after some epochs, on two cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    sar.patch_dgl()
    first, second = dgl.nn.GATConv(6, 4, 2, allow_zero_in_degree=True), dgl.nn.SAGEConv(8, 8, "mean")
    x, layers = data.leaf("x"), torch.nn.ModuleList([first, second]).double()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        out = second(graph, first(graph, x).flatten(1))
        weighted_sum(out, data.nodes["cotangent"]).backward()
        gradients = parameter_gradients(layers)
        optimizer.step()
    sar.unpatch_dgl()
    return {"node out": out, "node x.grad": x.grad, **gradients}


@pytest.mark.parametrize("world_size", [WORKERS])
def test_eight_workers_on_two_cores(pool):
    parts = parts_of([30, 0, 45, 20, 60, 10, 25, 40], edges_per_node=8)
    own = os.sched_getaffinity(0)
    try:
        check(pool, parts, random_data(parts, torch.float64), [(trained, ())], timeout=400)
    finally:
        os.sched_setaffinity(0, own)
