"""`Config.cache_constant_inputs`: nothing travels for what is known, and what has changed anywhere is computed anew."""

import random

import dgl
import dgl.function as fn
import dgl.nn.pytorch as dglnn
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sar
from sar import comm
from sar.core.relation import SAMPLED_ROWS, SAMPLES, Constants
from tests.hetero_graphs import partition_hetero
from tests.parity.harness import build, deal, random_data
from tests.parity.scenarios import SCENARIOS

CALLS = 4
CHANGED_RESULTS = ["result", "result, numpy", "result, .data"]


def mean(graph, x):
    with graph.local_scope():
        graph.srcdata["x"] = x
        graph.update_all(fn.copy_u("x", "m"), fn.mean("m", "out"))
        return graph.dstdata["out"]


def run(mine, change, who, mode, cache):
    """Results and bytes sent of some calls; `change` alters the input on worker `who` before the last."""
    partition, data = mine
    sar.Config.cache_constant_inputs = cache
    graph = build(partition, mode)
    x = data.nodes["x"].clone()
    results, sent = [], []
    for number in range(CALLS):
        if number == CALLS - 1 and sar.rank() == who:
            if change == "in place":
                x += 1
            elif change == "another tensor":
                x = x + 1
            elif change == "numpy":
                x.numpy()[-1] += 1
            elif change == ".data":
                x.data[-1] += 1
            elif change == "result":
                results[-1] += 1
            elif change == "result, numpy":
                results[-1].numpy()[-1] += 1
            elif change == "result, .data":
                results[-1].data[-1] += 1
        start = comm.statistics()
        results.append(mean(graph, x))
        sent.append((comm.statistics() - start).bytes_sent)
    return [r.clone() for r in results], sent


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("change", ["nothing", "in place", "another tensor", "numpy", ".data", *CHANGED_RESULTS])
def test_constant_inputs(pool, world_size, change):
    """From the third call on only the agreement travels; one worker's change of inputs makes all compute again."""
    parts = SCENARIOS["random"](world_size)
    mine = deal(parts, random_data(parts))
    for mode, who in ((1, 0), (3, world_size - 1)):
        plain = pool.run(run, change, who, mode, False, per_rank=mine)
        kept = pool.run(run, change, who, mode, True, per_rank=mine)
        for (expected, full), (results, sent) in zip(plain, kept, strict=True):
            assert all(map(torch.equal, results, expected))
            if world_size > 1:
                assert sent[:2] == full[:2]
                assert sent[2] < full[2] / 2
                assert (sent[3] < full[3] / 2) == (change in ("nothing", *CHANGED_RESULTS))


def looked_at(mine):
    """Samples that were taken of operands: of messages of sources, and then of edges."""
    partition, data = mine
    sar.Config.cache_constant_inputs = True
    graph, found = build(partition, 1), []
    relation = graph.call_context().relation
    for message in (fn.copy_u("x", "m"), fn.copy_e("w", "m")):
        graph.srcdata["x"], graph.edata["w"] = data.nodes["x"], data.edges["w"]
        for _ in range(CALLS):
            graph.update_all(message, fn.sum("m", "out"))
        found.append(len(relation.constants._known))
    return found


def served(mine):
    """What the result of a call gains where the kept one has gained 1."""
    partition, data = mine
    sar.Config.cache_constant_inputs = True
    graph = build(partition, 1)
    *_, before = (mean(graph, data.nodes["x"]) for _ in range(CALLS))
    (kept,) = graph.call_context().relation.constants._known.values()
    kept._result += 1
    return mean(graph, data.nodes["x"]) - before


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_kept_result_is_given(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    for gained in pool.run(served, per_rank=deal(parts, random_data(parts))):
        torch.testing.assert_close(gained, torch.ones_like(gained))


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_destinations_have_costs_nothing(pool, world_size):
    """Values of edges or destinations are not compared with anything, and no copies are kept."""
    parts = SCENARIOS["random"](world_size)
    for found in pool.run(looked_at, per_rank=deal(parts, random_data(parts))):
        assert found == [1, 1]


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


WIDTH = 6
HOPS = {
    "GraphConv both": (lambda: dglnn.GraphConv(WIDTH, 8, norm="both"), 1),
    "GraphConv left": (lambda: dglnn.GraphConv(WIDTH, 8, norm="left"), 1),
    "GraphConv edge_weight": (lambda: dglnn.GraphConv(WIDTH, 8, norm="both"), 1),
    "TAGConv": (lambda: dglnn.TAGConv(WIDTH, 8, k=2), 2),
    "SGConv": (lambda: dglnn.SGConv(WIDTH, 8, k=2), 2),
    "ChebConv": (lambda: dglnn.ChebConv(WIDTH, 8, k=3), 2),
    "APPNPConv edge_weight": (lambda: dglnn.APPNPConv(3, 0.1), 3),
    "dropout": (lambda: torch.nn.Sequential(torch.nn.Dropout(0.5), dglnn.GraphConv(WIDTH, 8)), 0),
}
"""Layers that make new operands of their input on every call, and how many of their exchanges are of constants."""


def epochs_of_layers(mine, mode, cache):
    """By layer, of some epochs: (result, gradient of a layer behind it), and bytes sent; x changes before the last."""
    partition, data = mine
    sar.patch_dgl()
    sar.Config.cache_constant_inputs = cache
    found = {}
    for name, (make, _) in HOPS.items():
        torch.manual_seed(3)
        graph = build(partition, mode).add_self_loop()  # a new one: some of these layers have operands in common
        weight = torch.rand(graph.num_edges(), dtype=torch.float64)
        layer, x, last = make().double(), data.nodes["x"].clone(), torch.nn.Linear(8, 2).double()
        if name.startswith("APPNPConv"):
            last = torch.nn.Linear(WIDTH, 2).double()
        made, sent = [], []
        for number in range(CALLS):
            if number == CALLS - 1 and sar.rank() == 0:
                x[-1] += 1
            last.zero_grad()
            start = comm.statistics()
            if name == "dropout":
                out = layer[1](graph, layer[0](x))
            else:
                out = layer(graph, x, edge_weight=weight) if name.endswith("weight") else layer(graph, x)
            last(out).tanh().sum().backward()
            sent.append((comm.statistics() - start).bytes_sent)
            made.append((out.detach().clone(), last.weight.grad.clone()))
        found[name] = made, sent
    return found, sum(graph.call_context().relation.plan.halo_counts[sar.rank()]) * WIDTH * 8


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("mode", [1, 2, 3])
def test_layers_that_scale_their_input(pool, world_size, mode):
    """In the third epoch their first hops send nothing; a change of one row on one worker brings all of it back."""
    parts = SCENARIOS["random"](world_size)
    mine = deal(parts, random_data(parts, torch.float64))
    plain, kept = (pool.run(epochs_of_layers, mode, cache, per_rank=mine) for cache in (False, True))
    for (expected, halo), (found, _) in zip(plain, kept, strict=True):
        for name, (_, hops) in HOPS.items():
            for one, other in zip(expected[name][0], found[name][0], strict=True):
                assert all(map(torch.equal, one, other)), name
            saved = [full - sent for full, sent in zip(expected[name][1], found[name][1], strict=True)]
            assert saved == [0, 0, hops * halo, 0], name


def hetero_epochs(data, cache):
    sar.Config.cache_constant_inputs = cache
    graph = sar.construct_full_graph(data)
    torch.manual_seed(3)
    convs = {etype: dglnn.GraphConv(30, 40, allow_zero_in_degree=True) for etype in ("likes", "made by", "follows")}
    layer, made, sent = dglnn.HeteroGraphConv(convs, "sum"), [], []
    x = {ntype: sar.suffix_key_lookup(data.node_features, f"{ntype}/x") for ntype in ("user", "item")}
    for _ in range(3):
        start = comm.statistics()
        made.append(layer(graph, x))
        sent.append((comm.statistics() - start).bytes_sent)
    return [{ntype: h.detach() for ntype, h in out.items()} for out in made], sent


@pytest.mark.parametrize("world_size", [2])
def test_relations_with_constants_of_their_own(pool, world_size):
    torch.manual_seed(1)
    ends = {"user": 30, "item": 20}
    etypes = [("user", "likes", "item"), ("item", "made by", "user"), ("user", "follows", "user")]
    edges = {(s, e, d): (torch.randint(ends[s], (90,)), torch.randint(ends[d], (90,))) for s, e, d in etypes}
    graph = dgl.heterograph(edges, num_nodes_dict=ends)
    for ntype, count in ends.items():
        graph.nodes[ntype].data["x"] = torch.randn(count, 30)
    parts = partition_hetero(graph, {n: torch.arange(count) % world_size for n, count in ends.items()}, world_size)
    plain, kept = (pool.run(hetero_epochs, cache, per_rank=parts.partitions) for cache in (False, True))
    for (expected, full), (found, sent) in zip(plain, kept, strict=True):
        for one, other in zip(expected, found, strict=True):
            assert all(torch.equal(one[ntype], other[ntype]) for ntype in ends)
        assert sent[:2] == full[:2]
        assert sent[2] < full[2] / 2


def mfg_epochs(mine, cache):
    partition, data = mine
    sar.Config.cache_constant_inputs = cache
    (block,) = sar.construct_mfgs(partition, torch.arange(*partition.node_ranges[sar.rank()], 3), 1)
    torch.manual_seed(3)
    layer, x = dglnn.GraphConv(WIDTH, 8, allow_zero_in_degree=True).double(), data.nodes["x"][block.input_nodes]
    made, sent = [], []
    for _ in range(3):
        start = comm.statistics()
        made.append(layer(block, x).detach())
        sent.append((comm.statistics() - start).bytes_sent)
    return torch.stack(made), sent


@pytest.mark.parametrize("world_size", [2])
def test_message_flow_graphs(pool):
    parts = SCENARIOS["random"](2)
    mine = deal(parts, random_data(parts, torch.float64))
    plain, kept = (pool.run(mfg_epochs, cache, per_rank=mine) for cache in (False, True))
    for (expected, full), (found, sent) in zip(plain, kept, strict=True):
        assert torch.equal(expected, found)
        assert sent[:2] == full[:2]
        assert sent[2] < full[2] / 2


def any_sequence(mine, cache):
    """Results of calls on operands that come back, change in place or are copied, on each worker as it pleases."""
    partition, data = mine
    sar.Config.cache_constant_inputs = cache
    graph, common, own = build(partition, 1), random.Random(0), random.Random(sar.rank() + 1)
    held, x, weights = [data.nodes["x"] * factor for factor in (1, 2)], None, data.edges["w"]
    message, reducer, wire, results = "copy_u", "sum", None, []
    for _ in range(300):
        if common.random() < 0.2:
            message, reducer = common.choice(["copy_u", "u_mul_e"]), common.choice(["sum", "max"])
        if common.random() < 0.1:
            wire = common.choice([None, torch.bfloat16])
        sar.Config.wire_dtype_features = wire
        if x is None or own.random() < 0.2:
            x = own.choice(held)
        change = own.random()
        if change < 0.05:
            x[own.randrange(len(x))] *= -1  # a second time, it is what it was
        graph.srcdata["x"] = x.clone() if change > 0.5 else x
        graph.edata["w"] = weights
        with torch.inference_mode(common.random() < 0.1):
            operands = ("x",) if message == "copy_u" else ("x", "w")
            graph.update_all(getattr(fn, message)(*operands, "m"), getattr(fn, reducer)("m", "out"))
        out = graph.dstdata["out"]
        results.append(out.clone())
        if own.random() < 0.05:
            out.numpy()[:] = 0
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_sequence_of_operands_is_served_what_is_stale(pool, world_size):
    """Above all where one worker's operands are known from one call, and another's from another."""
    parts = SCENARIOS["random"](world_size)
    mine = deal(parts, random_data(parts, torch.float64))
    plain, kept = (pool.run(any_sequence, cache, per_rank=mine) for cache in (False, True))
    for expected, found in zip(plain, kept, strict=True):
        assert all(map(torch.equal, expected, found))


def test_known_by_their_bits():
    """Also where the sample is the same; 0 is not -0, NaN is NaN, and dtypes differ."""
    rows = torch.rand(10 * SAMPLED_ROWS, 2)
    rows[1] = torch.tensor([0.0, torch.nan])
    constants = Constants()
    assert constants.find("call", [rows.clone()]) is None
    constants.find("call", [rows.clone()]).keep(rows, 1)
    assert torch.equal(constants.find("call", [rows.clone()]).result[0], rows[0])
    for other in ("another call", [rows.clone()]), ("call", [rows.double()]), ("call", [rows[:-1].clone()]):
        assert constants.find(*other) is None
    altered = rows.clone()
    altered[1, 0] = -0.0
    assert constants.find("call", [altered]) is None
    assert constants.find("call", [altered.clone()]).result is None


@given(st.lists(st.integers(0, SAMPLES + 3), max_size=60))
def test_copies_are_few(contents):
    """No more than `SAMPLES` are known at a time: those that were seen last."""
    constants, latest = Constants(), []
    for number in contents:
        known = constants.find("call", [torch.full((3, 2), float(number))])
        assert (known is not None) == (number in latest)
        latest = [*[n for n in latest if n != number][-SAMPLES + 1 :], number]


def of_a_negative_view(mine):
    partition, data = mine
    sar.Config.cache_constant_inputs = True
    graph, x = build(partition, 1), data.nodes["x"]
    view = torch.complex(x, -x).conj().imag
    assert view.is_neg()
    return [(mean(graph, view), mean(graph, x)) for _ in range(3)]


@pytest.mark.parametrize("world_size", [1])
def test_a_negative_view(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    for results in pool.run(of_a_negative_view, per_rank=deal(parts, random_data(parts, torch.float64))):
        assert all(map(torch.equal, *zip(*results, strict=True)))
