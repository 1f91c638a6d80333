"""`fetch_rows` and `global_ids` against indexing whole tensors, `pair_graph` against DGL's graph; what is refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sar
from tests.core.attempts import catch, catch_and_recover, require
from tests.graphs import partition_in_memory, random_graph
from tests.parity.harness import assert_close, build, parameter_gradients
from tests.sampling.scenes import global_ids, parts_of, typed_parts

COUNTS = {1: [11], 2: [7, 4], 3: [6, 0, 5], 4: [5, 0, 2, 4], 5: [3, 2, 0, 4, 2], 8: [1, 2, 0, 1, 3, 1, 2, 1]}


def drawn(rank, nodes):
    """Repeated nodes of any worker, in no order; none on worker 0 the second time."""
    generator = torch.Generator().manual_seed(rank)
    return [nodes[torch.randint(len(nodes), (9,), generator=generator)], nodes[: 3 * min(rank, 1)]]


def table(num_nodes):
    return torch.randn(num_nodes, 2, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def loss_of(rows, ids):
    return (rows.tanh() * torch.sin(ids.double() + 1)[:, None, None]).sum() + rows.pow(3).sum()


def fetch_on_worker(partition, nodes, ntype):
    graph = sar.construct_full_graph(partition)
    own = graph.node_ids(ntype)
    x = table(graph.node_ranges[-1][1])[own].requires_grad_()
    fetched = [sar.fetch_rows(graph, x, ids, ntype) for ids in drawn(sar.rank(), nodes)]
    sum(loss_of(rows, ids) for rows, ids in zip(fetched, drawn(sar.rank(), nodes), strict=True)).backward()
    numbers = sar.fetch_rows(graph, own * 2, nodes, ntype)
    assert numbers.equal(nodes * 2)
    assert not numbers.requires_grad
    with torch.no_grad():
        assert not sar.fetch_rows(graph, x, nodes, ntype).requires_grad
    return own, x.grad, [rows.detach() for rows in fetched]


def check(by_rank, nodes, num_nodes):
    whole = table(num_nodes).requires_grad_()
    asked = [ids for rank in range(len(by_rank)) for ids in drawn(rank, nodes)]
    sum(loss_of(whole[ids], ids) for ids in asked).backward()
    found = [rows for _, _, fetched in by_rank for rows in fetched]
    for ids, rows in zip(asked, found, strict=True):
        assert rows.equal(whole.detach()[ids])
    for own, grad, _ in by_rank:
        assert_close(grad, whole.grad[own], 1e-9)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rows_and_gradients(pool, world_size):
    parts = parts_of(COUNTS[world_size])
    check(pool.run(fetch_on_worker, torch.arange(11), None, per_rank=parts.partitions), torch.arange(11), 11)


@pytest.mark.parametrize("world_size", [1, 3])
def test_one_of_several_types(pool, world_size):
    parts = typed_parts(world_size)
    items = torch.cat(global_ids(parts, "item"))
    check(pool.run(fetch_on_worker, items, "item", per_rank=parts.partitions), items, 23)


def found_on_worker(partition, ntype, count):
    """The global IDs of this worker's picks, of none, and of all nodes; and this worker's own nodes' IDs."""
    graph = sar.construct_full_graph(partition)
    picks = torch.randint(count, (2, 5), generator=torch.Generator().manual_seed(sar.rank()))
    picks = picks[:, : 5 * min(sar.rank(), 1)].int()
    found = sar.global_ids(graph, picks, ntype)
    assert (found.dtype, found.shape) == (torch.int64, picks.shape)
    assert found.equal(sar.global_ids(graph, picks.numpy(), ntype))  # as data sets have them
    rows = torch.arange(graph.num_nodes(ntype)).view(-1, 1)
    ids = found.flatten()
    assert sar.fetch_rows(graph, rows, ids.numpy(), ntype).equal(sar.fetch_rows(graph, rows, ids, ntype))
    return (
        picks,
        found,
        sar.global_ids(graph, torch.arange(count), ntype),
        graph.node_ids(ntype),
        graph.original_ids(ntype),
    )


def check_ids(by_rank, count):
    own, originals = (torch.cat(columns) for columns in list(zip(*by_rank, strict=True))[3:])
    expected = torch.empty(count, dtype=torch.int64).index_copy_(0, originals, own)
    for picks, found, every, _, _ in by_rank:
        assert every.equal(expected)
        assert found.equal(expected[picks.long()])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_global_ids_of_original_ones(pool, world_size):
    assignment = torch.randint(world_size, (20,), generator=torch.Generator().manual_seed(1))
    parts = partition_in_memory(random_graph(0, 20, 40), assignment, world_size)
    check_ids(pool.run(found_on_worker, None, 20, per_rank=parts.partitions), 20)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("ntype, count", [("user", 14), ("item", 9)])
def test_global_ids_of_a_type(pool, world_size, ntype, count):
    check_ids(pool.run(found_on_worker, ntype, count, per_rank=typed_parts(world_size).partitions), count)


def ids_of_nobody(partition, num_nodes):
    graph, asked = sar.construct_full_graph(partition), [3, num_nodes] if sar.rank() else [3]
    failure = catch_and_recover(sar.global_ids, graph, torch.tensor(asked))
    del partition.node_features["orig_id"]
    return failure, catch_and_recover(sar.global_ids, sar.construct_full_graph(partition), torch.tensor([3]))


@pytest.mark.parametrize("world_size", [2])
def test_original_ids_that_are_not_there(pool, world_size):
    results = pool.run(ids_of_nobody, sum(COUNTS[world_size]), per_rank=parts_of(COUNTS[world_size]).partitions)
    last = sum(COUNTS[world_size]) - 1
    assert f"The original IDs are 3 to {last + 1}; expected some of 0 to {last}" in results[1][0].message
    assert all("do not have the nodes' IDs in the input graph" in unknown.message for _, unknown in results)


# -- pairs

NEGATIVES = 3


def drawn_pairs(rank, sources, destinations, count):
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


def features(num_nodes):
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
    src, dst = drawn_pairs(rank, nodes, nodes, 9)
    positive, negative = sar.pair_graph(graph, src, dst), sar.pair_graph(graph, *corrupted(rank, src, nodes))
    own = graph.node_ids()
    x = features(len(nodes))[own].requires_grad_()
    results = step(graph, positive, negative, x, lambda pairs, values: pairs.in_given_order(values), 20)
    assert positive.num_edges_global() == sum(len(drawn_pairs(r, nodes, nodes, 9)[0]) for r in range(sar.world_size()))
    with torch.no_grad():
        fetched = sar.fetch_rows(graph, x, src) * sar.fetch_rows(graph, x, dst)
        assert_close(positive.in_given_order(dot(positive, x)), fetched.sum(1), 1e-9)
    assert not positive.in_given_order(positive.edata["_ID"]).requires_grad
    first = sum(len(drawn_pairs(r, nodes, nodes, 9)[0]) for r in range(rank))
    assert positive.local_var().in_given_order(positive.edata["_ID"]).equal(torch.arange(first, first + len(src)))
    return own, x.grad, results, positive.in_degrees(), positive.out_degrees()


@pytest.mark.parametrize("world_size, mode", [(1, 1), (2, 1), (3, 1), (3, 2), (3, 3)])
def test_a_step_is_that_of_one_machine(pool, world_size, mode):
    import dgl

    parts = parts_of(COUNTS[world_size])
    by_rank = pool.run(step_on_worker, mode, per_rank=parts.partitions)
    nodes = torch.arange(11)
    given = [drawn_pairs(rank, nodes, nodes, 9) for rank in range(world_size)]
    wrong = [corrupted(rank, src, nodes) for rank, (src, _) in enumerate(given)]
    positive, negative = (
        dgl.graph(tuple(map(torch.cat, zip(*pairs, strict=True))), num_nodes=11) for pairs in (given, wrong)
    )
    x = features(11).requires_grad_()
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
    src, dst = drawn_pairs(sar.rank(), *ends, 12)
    pairs = sar.pair_graph(graph, src, dst, etype)
    assert pairs.ntypes == graph.ntypes
    h = {ntype: features(23)[graph.node_ids(ntype)].requires_grad_() for ntype in graph.ntypes}
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
    src, dst = (torch.cat(ids) for ids in zip(*[drawn_pairs(r, *ends, 12) for r in range(world_size)], strict=True))
    x = features(23).requires_grad_()
    scores = (x[src] * x[dst]).sum(1)
    scores.tanh().sum().backward()
    assert_close(torch.cat([found for found, _ in by_rank]), scores, 1e-9)
    for _, grads in by_rank:
        for ntype, (own, grad) in grads.items():
            expected = x.grad[own]
            assert_close(grad if ntype in (source, destination) else torch.zeros_like(expected), expected, 1e-9)


# -- what is refused


def other_pairs_of_equal_number(graph, users):
    pairs = [sar.pair_graph(graph, users, users, "follows") for _ in range(2)]
    scored = pairs[sar.rank()]
    scored.in_given_order(scored.edata["_ID"])


def fetch(graph, users, ids, *ntype, rows=slice(None), width=2):
    return sar.fetch_rows(graph, torch.zeros(len(users), width)[rows], ids, *ntype)


def pair(graph, users, *etype, ids=None):
    return sar.pair_graph(graph, *[users if ids is None else ids] * 2, *etype)


MISTAKES = {
    "which is not of the type 'user'": lambda graph, users: fetch(graph, users, graph.node_ids("item"), "user"),
    "such as 23, are not of the graph's nodes": lambda graph, users: fetch(graph, users, torch.tensor([23]), "user"),
    "several node types; name one": lambda graph, users: fetch(graph, users, users),
    "expected 7 rows": lambda graph, users: fetch(graph, users, users, "user", rows=slice(-1)),
    "fetch_rows of user": lambda graph, users: fetch(graph, users, users, "user", width=1 + sar.rank()),
    "which is not of the type 'item'": lambda graph, users: pair(graph, users, "buys"),
    "such as 30, are not of": lambda graph, users: pair(graph, users, "follows", ids=torch.tensor([0, 30])),
    "7 sources and 6 destinations": lambda graph, users: sar.pair_graph(graph, users, users[sar.rank() :], "follows"),
    "The graph has 3 edge types; name one": pair,
    "There is no node type 'hat' here": lambda graph, users: pair(graph, users, ("user", "wears", "hat")),
    "A message flow graph has only some of the nodes": lambda graph, users: pair(graph, users, "follows"),
    "one for each pair": lambda graph, users: pair(graph, users, "follows").in_given_order(torch.zeros(1)),
    "in_given_order of torch.int64 []": other_pairs_of_equal_number,
}
"""Calls by a part of the message of their error; `users` are the worker's own."""


def mistake(partition, words):
    graph = sar.construct_full_graph(partition)
    users = graph.node_ids("user")
    graph = sar.construct_mfgs(partition, users, 1)[0] if words.startswith("A message flow graph") else graph
    return catch(MISTAKES[words], graph, users)


@pytest.mark.parametrize("words", MISTAKES)
@pytest.mark.parametrize("world_size", [2])
def test_mistakes_reach_all_workers(pool, words):
    failures = pool.run(mistake, words, per_rank=typed_parts(2).partitions)
    assert any(words in require(failure).message for failure in failures)
    assert all("SarError" in require(failure).bases for failure in failures)
