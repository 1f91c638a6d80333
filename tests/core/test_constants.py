"""`Config.cache_constant_inputs`: nothing travels for what is known, and what has changed anywhere is computed anew."""

import dgl.function as fn
import pytest
import torch

import sar
from sar import comm
from tests.parity.harness import build, deal, random_data
from tests.parity.scenarios import SCENARIOS

CALLS = 4


def mean(graph, x):
    with graph.local_scope():
        graph.srcdata["x"] = x
        graph.update_all(fn.copy_u("x", "m"), fn.mean("m", "out"))
        return graph.dstdata["out"]


def run(mine, change, mode, cache):
    """Results and bytes sent of some calls; `change` alters the input on worker 0 before the last."""
    partition, data = mine
    sar.Config.cache_constant_inputs = cache
    graph = build(partition, mode)
    x = data.nodes["x"].clone()
    results, sent = [], []
    for number in range(CALLS):
        if number == CALLS - 1 and sar.rank() == 0:
            if change == "in place":
                x += 1
            elif change == "another tensor":
                x = x + 1
            elif change == "result" and results:
                results[-1] += 1
        start = comm.statistics()
        results.append(mean(graph, x))
        sent.append((comm.statistics() - start).bytes_sent)
    return [r.clone() for r in results], sent


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("change", ["nothing", "in place", "another tensor", "result"])
def test_constant_inputs(pool, world_size, change):
    """From the third call on only the agreement travels; one worker's change makes all compute again."""
    parts = SCENARIOS["random"](world_size)
    mine = deal(parts, random_data(parts))
    for mode in (1, 3):
        plain = pool.run(run, change, mode, False, per_rank=mine)
        kept = pool.run(run, change, mode, True, per_rank=mine)
        for (expected, full), (results, sent) in zip(plain, kept, strict=True):
            for number, (value, wanted) in enumerate(zip(results, expected, strict=True)):
                if change != "result" or number in (0, CALLS - 1):  # kept results share memory
                    assert torch.equal(value, wanted)
            if world_size > 1:
                assert sent[:2] == full[:2]
                assert sent[2] < full[2] / 2
                assert (sent[3] < full[3] / 2) == (change == "nothing")


def train(mine, cache):
    """Losses and a gradient of two layers, the first of which reads constants."""
    partition, data = mine
    sar.Config.cache_constant_inputs = cache
    graph = build(partition, 1)
    weight = torch.full((6, 6), 0.1, dtype=torch.float64, requires_grad=True)
    losses = []
    for _ in range(CALLS):
        weight.grad = None
        loss = mean(graph, mean(graph, data.nodes["x"]) @ weight).tanh().sum()
        loss.backward()
        losses.append(loss.detach())
    with torch.no_grad():  # evaluation forgets nothing
        losses.append(mean(graph, mean(graph, data.nodes["x"]) @ weight).sum())
    return torch.stack(losses), weight.grad


@pytest.mark.parametrize("world_size", [2])
def test_training_is_the_same(pool, world_size):
    """What needs a gradient is computed anew."""
    parts = SCENARIOS["random"](world_size)
    mine = deal(parts, random_data(parts, torch.float64))
    for plain, kept in zip(*(pool.run(train, cache, per_rank=mine) for cache in (False, True)), strict=True):
        for one, other in zip(plain, kept, strict=True):
            assert torch.equal(one, other)
