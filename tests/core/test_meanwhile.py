"""What a layer computes while a call's first messages travel, and may fail or be left there."""

from unittest.mock import patch

import dgl.nn
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import SAGEConv

import sar
from sar.core.passing import messages, reducers
from tests.core.attempts import fail_on_all_ranks
from tests.parity.harness import build, check, parameter_gradients, random_data, random_shares, weighted_sum
from tests.parity.pyg_layers import edges_of
from tests.parity.scenarios import SCENARIOS


def checkpointed(graph, data):
    """The recomputation of the first layer ends in `fc_self`, the last that saves something, amid the call."""
    torch.manual_seed(1)
    if dist.is_initialized():
        sar.patch_dgl()
    layers = [dgl.nn.SAGEConv(*widths, "mean").to(torch.float64) for widths in ((6, 4), (4, 6))]
    x = h = data.leaf("x")
    for layer in layers:
        h = checkpoint(lambda h, layer=layer: layer(graph, h), h, use_reentrant=False)
    weighted_sum(h, data.nodes["cotangent"]).backward()
    return {"node h": h, "node x.grad": x.grad, **parameter_gradients(nn.ModuleList(layers))}


def hooked(graph, data, kind):
    """Hooks on the module beside the call see and change what they do on one machine; so do those on `propagate`."""
    torch.manual_seed(1)
    layer, x, seen = SAGEConv(6, 4).double(), data.leaf("x"), []
    layer.lin_r.register_forward_hook(lambda module, given, made: seen.append(made) or 2 * made)
    if kind == "propagate":
        layer.register_propagate_forward_hook(lambda module, given, made: 3 * made)
    out = layer(x, edges_of(graph))
    weighted_sum(out, data.nodes["cotangent"][:, :4]).backward()
    assert isinstance(layer.lin_r, nn.Module)
    [own] = seen
    return {"node own": own, "node h": out, "node x.grad": x.grad, **parameter_gradients(layer)}


def lazy(graph, data):
    """Parameters are drawn in the order in which the layer calls its modules."""
    torch.manual_seed(1)
    layer, x = SAGEConv(-1, 4).double(), data.leaf("x")
    return {"node first": layer(x, edges_of(graph)), "node second": layer(x, edges_of(graph))}


class Tied(SAGEConv):
    """Also applies to neighbours' rows what `SAGEConv` applies to the nodes' own."""

    def message(self, x_j):
        return self.lin_r(x_j) + self.lin_r.weight.sum()


def tied(graph, data):
    torch.manual_seed(1)
    layer, x = Tied(6, 6).double(), data.leaf("x")
    out = layer(x, edges_of(graph))
    weighted_sum(out[:, :4], data.nodes["cotangent"][:, :4]).backward()
    return {"node h": out, "node x.grad": x.grad, **parameter_gradients(layer)}


def normalised(graph, data):
    """What a layer does beside a call makes a distributed call of its own."""
    torch.manual_seed(1)
    norm = sar.DistributedBN1D(4) if dist.is_initialized() else nn.BatchNorm1d(4)
    layer, x = SAGEConv(6, 4), data.leaf("x")
    layer.lin_r = nn.Sequential(layer.lin_r, norm)
    out = layer.double()(x, edges_of(graph))
    weighted_sum(out, data.nodes["cotangent"][:, :4]).backward()
    return {"node h": out, "node x.grad": x.grad, **parameter_gradients(layer)}


@pytest.mark.parametrize("world_size", [2, 3])
def test_layers(pool, world_size):
    parts = SCENARIOS["isolated"](world_size)
    cases = [(program, ()) for program in (checkpointed, lazy, tied, normalised)]
    cases += [(hooked, (kind,)) for kind in ("module", "propagate")]
    check(pool, parts, random_data(parts, torch.float64), cases)


def add_own(graph, x, work):
    """The mean of the sources' x and each node's own x; `work` is called along with the latter."""

    def own():
        work()
        return 2 * x

    with messages.meanwhile(own) as made:
        mean = messages.aggregate(graph.call_context(), messages.COPY_SOURCE, "mean", x)
    return mean + made()


def order_of(mine):
    """What happens in a forward, and the gradients beside those of the same in two steps."""
    partition, data = mine
    graph, x, same, events, aggregate_sum = (
        build(partition, 1),
        data.leaf("x"),
        data.leaf("x"),
        [],
        reducers.aggregate_sum,
    )

    def noting(*args, **kwargs):
        events.append("edges")
        aggregate_sum(*args, **kwargs)

    with patch.object(reducers, "aggregate_sum", noting):
        out = add_own(graph, x, lambda: events.append("own"))
    weighted_sum(out, data.nodes["cotangent"]).backward()
    mean = messages.aggregate(graph.call_context(), messages.COPY_SOURCE, "mean", same)
    weighted_sum(mean + 2 * same, data.nodes["cotangent"]).backward()
    assert torch.equal(x.grad, same.grad)
    return events


@pytest.mark.parametrize("world_size", [2])
def test_it_comes_before_the_edges(pool, world_size):
    for events in pool.run(order_of, per_rank=random_shares(world_size, torch.float64)):
        assert events == ["own", "edges", "edges"]


def change_in_place(graph, data):
    x = 1 * data.leaf("x")
    add_own(graph, x, lambda: torch.relu_(x))


def fail_on_worker_1(graph, data):
    def work():
        if sar.rank() == 1:
            raise ValueError("on purpose")

    add_own(graph, data.leaf("x"), work)
    sar.all_sum(1.0)


@pytest.mark.parametrize("program, words", [(change_in_place, "in place"), (fail_on_worker_1, "on purpose")])
@pytest.mark.parametrize("world_size", [2])
def test_its_errors_reach_everybody(pool, world_size, program, words):
    """Work that would change rows before they have all left is refused."""
    failures = fail_on_all_ranks(pool, SCENARIOS["random"](world_size), program)
    assert all(words in failure.message for failure in failures)
