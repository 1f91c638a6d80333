"""`pair_graph` against DGL's graph of the same pairs: scores, losses and all gradients, types, and what is refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sar
from tests.core.attempts import catch, require
from tests.parity.harness import assert_close, build, parameter_gradients
from tests.sampling.scenes import global_ids, parts_of, typed_parts

COUNTS = {1: [11], 2: [7, 4], 3: [6, 0, 5], 4: [5, 0, 2, 6], 5: [3, 4, 0, 6, 5], 8: [3, 2, 4, 1, 0, 3, 2, 3]}
NEGATIVES = 3


def drawn(rank, sources, destinations, count):
    """Pairs of any workers' nodes in no order, some repeated; none from the third worker on."""
    if rank > 1:
        count = 0
    generator = torch.Generator().manual_seed(rank)
    src, dst = (ids[torch.randint(len(ids), (count,), generator=generator)] for ids in (sources, destinations))
    if count and sources.equal(destinations):
        src[1], dst[1] = src[0], dst[0]
        src[2] = dst[2]
    return src, dst


def corrupted(rank, src, nodes):
    generator = torch.Generator().manual_seed(7 + rank)
    return src.repeat_interleave(NEGATIVES), nodes[
        torch.randint(len(nodes), (len(src) * NEGATIVES,), generator=generator)
    ]


def table(num_nodes):
    return torch.randn(num_nodes, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def dot(pairs, h):
    """As DGL's guide writes it."""
    import dgl.function as fn

    with pairs.local_scope():
        pairs.ndata["h"] = h
        pairs.apply_edges(fn.u_dot_v("h", "h", "score"))
        return pairs.edata["score"].squeeze(1)


def asymmetric(pairs, h):
    pairs = pairs.local_var()
    pairs.ndata["h"] = h
    pairs.apply_edges(lambda edges: {"score": (edges.src["h"] * edges.dst["h"].tanh()).sum(1)})
    return pairs.edata["score"]


def encoder():
    import dgl.nn

    torch.manual_seed(0)
    layers = [dgl.nn.SAGEConv(5, 4, "mean", activation=torch.tanh), dgl.nn.SAGEConv(4, 4, "mean")]
    return nn.ModuleList(layers).double()


def step(graph, positive, negative, x, given, count):
    """One loss of scores where they are, one of scores in the given order; scores, losses, gradients."""
    model = encoder()
    h = x
    for layer in model:
        h = layer(graph, h)
    scores = [dot(positive, h), asymmetric(negative, h)]
    local = F.binary_cross_entropy_with_logits(scores[0], torch.ones_like(scores[0]), reduction="sum")
    local = local + F.softplus(scores[1]).sum()
    ours, theirs = given(positive, scores[0]), given(negative, scores[1]).view(-1, NEGATIVES)
    weight = torch.arange(1, NEGATIVES + 1)
    margin = ((1 - ours.unsqueeze(1) + theirs).clamp(min=0) * weight).sum()
    ((local + margin) / count).backward()
    losses = torch.stack([local.detach(), margin.detach()])
    return losses, ours.detach(), theirs.detach(), parameter_gradients(model)


def step_on_worker(partition, mode):
    graph, rank = build(partition, mode), sar.rank()
    nodes = torch.arange(graph.node_ranges[-1][1])
    src, dst = drawn(rank, nodes, nodes, 9)
    positive, negative = sar.pair_graph(graph, src, dst), sar.pair_graph(graph, *corrupted(rank, src, nodes))
    own = graph.node_ids()
    x = table(len(nodes))[own].requires_grad_()
    results = step(graph, positive, negative, x, lambda pairs, values: pairs.in_given_order(values), 20)
    assert positive.num_edges_global() == sum(len(drawn(r, nodes, nodes, 9)[0]) for r in range(sar.world_size()))
    with torch.no_grad():
        fetched = sar.fetch_rows(graph, x, src) * sar.fetch_rows(graph, x, dst)
        assert_close(positive.in_given_order(dot(positive, x)), fetched.sum(1), 1e-9)
    assert not positive.in_given_order(positive.edata["_ID"]).requires_grad
    first = sum(len(drawn(r, nodes, nodes, 9)[0]) for r in range(rank))
    assert positive.local_var().in_given_order(positive.edata["_ID"]).equal(torch.arange(first, first + len(src)))
    return own, x.grad, results, positive.in_degrees(), positive.out_degrees()


@pytest.mark.parametrize("world_size, mode", [(1, 1), (2, 1), (3, 1), (3, 2), (3, 3)])
def test_a_step_is_that_of_one_machine(pool, world_size, mode):
    import dgl

    parts = parts_of(COUNTS[world_size])
    by_rank = pool.run(step_on_worker, mode, per_rank=parts.partitions)
    nodes = torch.arange(11)
    given = [drawn(rank, nodes, nodes, 9) for rank in range(world_size)]
    wrong = [corrupted(rank, src, nodes) for rank, (src, _) in enumerate(given)]
    positive, negative = (
        dgl.graph(tuple(map(torch.cat, zip(*pairs, strict=True))), num_nodes=11) for pairs in (given, wrong)
    )
    x = table(11).requires_grad_()
    losses, ours, theirs, gradients = step(parts.reference(), positive, negative, x, lambda pairs, values: values, 20)
    assert_close(sum(results[0] for _, _, results, _, _ in by_rank), losses, 1e-9)
    assert_close(torch.cat([results[1] for _, _, results, _, _ in by_rank]), ours, 1e-9)
    assert_close(torch.cat([results[2] for _, _, results, _, _ in by_rank]), theirs, 1e-9)
    for own, grad, (_, _, _, found), in_degrees, out_degrees in by_rank:
        assert_close(grad, x.grad[own], 1e-9)
        assert in_degrees.equal(positive.in_degrees()[own])
        assert out_degrees.equal(positive.out_degrees()[own])
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert_close(found[name], gradient, 1e-9)


def typed_scores(graph, etype, h, score="score"):
    import dgl.function as fn

    with graph.local_scope():
        graph.ndata["h"] = h
        graph.apply_edges(fn.u_dot_v("h", "h", score), etype=etype)
        return graph.edges[etype].data[score].squeeze(1)


def typed_on_worker(partition, ends, etype):
    graph = sar.construct_full_graph(partition)
    src, dst = drawn(sar.rank(), *ends, 12)
    pairs = sar.pair_graph(graph, src, dst, etype)
    assert pairs.ntypes == graph.ntypes
    h = {ntype: table(23)[graph.node_ids(ntype)].requires_grad_() for ntype in graph.ntypes}
    scores = pairs.in_given_order(typed_scores(pairs, etype, h))
    scores.tanh().sum().backward()
    return scores.detach(), {ntype: (graph.node_ids(ntype), rows.grad) for ntype, rows in h.items()}


@pytest.mark.parametrize("etype", ["buys", ("item", "like", "item")])
@pytest.mark.parametrize("world_size", [1, 3])
def test_one_of_several_types_and_a_new_one(pool, world_size, etype):
    parts = typed_parts(world_size)
    source, _, destination = ("user", "buys", "item") if etype == "buys" else etype
    ends = [torch.cat(global_ids(parts, ntype)) for ntype in (source, destination)]
    by_rank = pool.run(typed_on_worker, ends, etype, per_rank=parts.partitions)
    src, dst = (torch.cat(ids) for ids in zip(*[drawn(r, *ends, 12) for r in range(world_size)], strict=True))
    x = table(23).requires_grad_()
    scores = (x[src] * x[dst]).sum(1)
    scores.tanh().sum().backward()
    assert_close(torch.cat([found for found, _ in by_rank]), scores, 1e-9)
    for _, grads in by_rank:
        for ntype, (own, grad) in grads.items():
            expected = x.grad[own]
            assert_close(grad if ntype in (source, destination) else torch.zeros_like(expected), expected, 1e-9)


def mistakes(partition, program):
    graph = sar.construct_full_graph(partition)
    return catch(program, graph, partition)


def sources_of_another_type(graph, partition):
    ids = graph.node_ids("item")
    sar.pair_graph(graph, ids, ids, "buys")


def destinations_of_another_type(graph, partition):
    ids = graph.node_ids("user")
    sar.pair_graph(graph, ids, ids, "buys")


def outside(graph, partition):
    ids = torch.tensor([0, 23])
    sar.pair_graph(graph, ids, ids, "follows")


def unequal(graph, partition):
    ids = graph.node_ids("user")
    sar.pair_graph(graph, ids, ids[: len(ids) - (sar.rank() == 1)], "follows")


def no_type(graph, partition):
    sar.pair_graph(graph, *[torch.tensor([0])] * 2)


def unknown_type(graph, partition):
    sar.pair_graph(graph, *[torch.tensor([0])] * 2, ("user", "wears", "hat"))


def message_flow_graph(graph, partition):
    ids = graph.node_ids("user")
    sar.pair_graph(sar.construct_mfgs(partition, ids, 1)[0], ids, ids, "follows")


def other_values(graph, partition):
    ids = graph.node_ids("user")
    sar.pair_graph(graph, ids, ids, "follows").in_given_order(torch.zeros(len(ids) + 1))


def other_pairs_of_equal_number(graph, partition):
    ids = graph.node_ids("user")
    pairs = [sar.pair_graph(graph, ids, ids, "follows") for _ in range(2)]
    scored = pairs[sar.rank()]
    scored.in_given_order(scored.edata["_ID"])


@pytest.mark.parametrize(
    "program, words",
    [
        (sources_of_another_type, "which is not of the type 'user'"),
        (destinations_of_another_type, "which is not of the type 'item'"),
        (outside, "1 of the IDs, such as 23, are not of the graph's nodes; expected global IDs from 0 to 22"),
        (unequal, "7 sources and 6 destinations"),
        (no_type, "The graph has 3 edge types; name one"),
        (unknown_type, "There is no node type 'hat' here"),
        (message_flow_graph, "A message flow graph has only some of the nodes"),
        (other_values, "expected 7 rows, one for each pair into this worker"),
        (other_pairs_of_equal_number, "in_given_order of torch.int64 []"),
    ],
)
@pytest.mark.parametrize("world_size", [2])
def test_mistakes_reach_all_workers(pool, program, words):
    failures = pool.run(mistakes, program, per_rank=typed_parts(2).partitions)
    assert any(words in require(failure).message for failure in failures)
    assert all("SarError" in require(failure).bases for failure in failures)
