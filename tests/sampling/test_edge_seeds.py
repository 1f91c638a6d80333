"""Seed edges: batches are DGL's on one machine for the same seeds, exclusions and negative pairs."""

from collections import Counter
from itertools import chain

import dgl
import dgl.nn.pytorch as dglnn
import pytest
import torch
from scipy import stats
from torch.nn import functional

import sar
from tests.core.attempts import catch_and_recover, require
from tests.matrix import corner
from tests.parity.harness import assert_close, parameter_gradients
from tests.sampling.cases import same
from tests.sampling.edge_cases import check_batch, describe_batch, plain_case, typed_case
from tests.sampling.scenes import BOUGHT, BUYS, FOLLOWS

E = ("_N", "_E", "_N")


def load(mine, batch_size, inner, outer, loader):
    """The batches of an epoch."""
    partition, seeds, reverse = mine
    graph = sar.construct_full_graph(partition)
    if reverse is not None:
        outer = outer | {"reverse_eids": reverse[graph.edata[dgl.EID]]}
    sampler = sar.EdgePredictionSampler(sar.DistNeighborSampler(**inner), **outer)
    batches = sar.DataLoader(graph, seeds, sampler, batch_size, seed=2, foreign_seeds=True, **loader)
    return [describe_batch(batch) for batch in batches]


def seeds_of(case, world_size):
    """`dgl.EID` for every worker, some of them other workers' edges."""
    count = len(case.edge_orig)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))[: count * 2 // 3]
    return [order[order % world_size == rank][: 7 if rank else None] for rank in range(world_size)]


@pytest.mark.parametrize("exclude", [None, "self", "reverse_id"])
@pytest.mark.parametrize("world_size, kind", [(1, ""), (2, "empty"), corner(3, ""), (3, "scattered")])
def test_batches_are_dgl_s(pool, world_size, kind, exclude):
    case, reverse, by_orig = plain_case(world_size, kind), None, None
    seeds = seeds_of(case, world_size)
    if exclude == "reverse_id":  # DGL takes any edge for the reverse
        by_orig = torch.randint(110, (110,), generator=torch.Generator().manual_seed(5))
        reverse = case.new_edge_ids(E)[by_orig[case.edge_orig]]
    rule = {
        None: None,
        "self": lambda ids: {E: ids[E].clone()},
        "reverse_id": lambda ids: {E: torch.cat([ids[E], by_orig[ids[E]]])} if by_orig is not None else None,
    }[exclude]
    given = [(partition, ids, reverse) for partition, ids in zip(case.partitions, seeds, strict=True)]
    options = {"fanouts": [-1, -1]}, {"exclude": exclude, "negative_sampler": 2}, {"shuffle": True}
    found = pool.run(load, 8, *options, per_rank=given)
    for batches, ids in zip(found, seeds, strict=True):
        taken = [batch["pairs"][0]["edges"][E][2]["_ID"] for batch in batches]
        assert torch.equal(torch.cat(taken).sort().values, ids.sort().values)
        for batch, of_batch in zip(batches, taken, strict=True):
            check_batch(case, batch, {E: case.edge_orig[of_batch]}, rule, [-1, -1])
            assert len(batch["pairs"][1]["edges"][E][0]) == 2 * len(of_batch)


def load_typed(mine, exclude, backs, negatives, fanouts):
    partition, chosen = mine
    graph = sar.construct_full_graph(partition)
    sampler = sar.EdgePredictionSampler(
        sar.DistNeighborSampler(fanouts), exclude, reverse_etypes=backs, negative_sampler=negatives
    )
    loader = sar.DataLoader(graph, chosen, sampler, 6, shuffle=True, seed=1)
    return [describe_batch(batch) for batch in loader]


def rows_and_masks(partition):
    graph = sar.construct_full_graph(partition)
    rows = {BUYS: torch.arange(0, graph.num_edges(BUYS), 2).flip(0), "follows": torch.arange(graph.num_edges(FOLLOWS))}
    masks = {etype: torch.zeros(graph.num_edges(etype), dtype=torch.bool) for etype in rows}
    for etype, index in rows.items():
        masks[etype][index] = True
    shares = sar.split_edges(graph, rows), sar.split_edges(graph, masks)
    return rows, shares, torch.cat([graph.edges[etype].data[dgl.EID][index] for etype, index in rows.items()])


@pytest.mark.parametrize("negatives", [None, 3, {BUYS: 2}])
@pytest.mark.parametrize("world_size", [1, corner(2), 3])
def test_typed_batches_are_dgl_s(pool, world_size, negatives):
    case = typed_case(world_size)
    backs = {"buys": "bought by", "bought by": "buys"}
    given = pool.run(rows_and_masks, per_rank=case.partitions)
    mine = [(partition, rows) for partition, (rows, _, _) in zip(case.partitions, given, strict=True)]
    results = pool.run(load_typed, "reverse_types", backs, negatives, [-1, -1], per_rank=mine)
    for batches, (_, _, ids) in zip(results, given, strict=True):
        taken = []
        for batch in batches:
            seeds = {}
            for etype in (BUYS, FOLLOWS):
                of_type = batch["pairs"][0]["edges"][etype][2]["_ID"]
                seeds[etype] = case.edge_orig[of_type]
                taken.append(of_type)
            check_batch(case, batch, seeds, lambda ids: {**ids, BOUGHT: ids[BUYS].clone()}, [-1, -1])
            drawn = {t: len(v) for t, (_, v, _) in batch["pairs"][-1]["edges"].items()}
            per_seed = [3, 3] if negatives == 3 else [2, 0]
            if negatives is not None:
                assert [drawn[BUYS], drawn[FOLLOWS]] == [
                    n * len(seeds[t]) for n, t in zip(per_seed, seeds, strict=True)
                ]
        assert torch.equal(torch.cat(taken).sort().values, ids.sort().values)


@pytest.mark.parametrize("world_size", [1, 3])
def test_equal_shares_of_edges(pool, world_size):
    results = pool.run(rows_and_masks, per_rank=typed_case(world_size).partitions)
    shares, everything = [share for _, (share, _), _ in results], torch.cat([ids for *_, ids in results])
    assert torch.equal(torch.cat(shares).sort().values, everything.sort().values)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    for _, (share, of_masks), own in results:
        assert torch.equal(share, of_masks)
        assert int(torch.isin(share, own).sum()) == min(len(share), len(own))


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("world_size", [2])
def test_finite_fanouts(pool, world_size, replace):
    """Edges of the graph, at most as many as asked for, none of the seeds among them, and those missing for them."""
    case = plain_case(world_size)
    seeds = seeds_of(case, world_size)
    given = [(partition, ids, None) for partition, ids in zip(case.partitions, seeds, strict=True)]
    inner = {"fanouts": [2, 3], "replace": replace}
    options = {"negative_sampler": dgl.dataloading.negative_sampler.Uniform(1)}, {}
    without = pool.run(load, 9, inner, *options, per_rank=given)
    found = pool.run(load, 9, inner, options[0] | {"exclude": "self"}, {}, per_rank=given)
    removed = 0
    for batch, whole in zip(chain(*found), chain(*without), strict=True):
        ids = batch["pairs"][0]["edges"][E][2]["_ID"]
        assert same(batch["pairs"], whole["pairs"])
        for block, fanout in zip(batch["blocks"], [2, 3], strict=True):
            src, dst, fields = block["edges"][E]
            u, v = case.whole.find_edges(case.edge_orig[fields["_ID"]])
            assert torch.equal(case.node_orig[src], u)
            assert torch.equal(case.node_orig[dst], v)
            assert not torch.isin(fields["_ID"], ids).any()
            assert torch.equal(fields["w"], case.whole.edata["w"][case.edge_orig[fields["_ID"]]])
            assert max(torch.bincount(dst).tolist(), default=0) <= fanout
        # Draws come first: at the seeds' ends, what is left of the same draws.
        last, drawn = (b["blocks"][-1]["edges"][E][2]["_ID"] for b in (batch, whole))
        assert torch.equal(last, drawn[~torch.isin(drawn, ids)])
        removed += len(drawn) - len(last)
    assert removed > 20


class LinkModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layers = torch.nn.ModuleList([dglnn.SAGEConv(3, 5, "mean"), dglnn.SAGEConv(5, 4, "gcn")]).double()

    def step(self, batch, x):
        """Scores of the pairs of both graphs; leaves gradients."""
        _, positive, negative, blocks = batch
        h = self.layers[1](blocks[1], torch.tanh(self.layers[0](blocks[0], x)))
        scores = [(h[u] * h[v]).sum(1) for u, v in (graph.edges(order="eid") for graph in (positive, negative))]
        (functional.softplus(-scores[0]).sum() + functional.softplus(scores[1]).sum()).backward()
        return [score.detach() for score in scores]


def train(mine):
    partition, seeds, x = mine
    graph, model = sar.construct_full_graph(partition), LinkModel()
    sampler = sar.DistNeighborSampler([-1, -1], input_node_features={"x": x})
    sampler = sar.EdgePredictionSampler(sampler, "self", negative_sampler=2)
    batch = sampler.sample(graph, seeds)
    scores = model.step(batch, batch[-1][0].srcdata["x"])
    return describe_batch(batch), scores, parameter_gradients(model)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_step_is_dgl_s(pool, world_size):
    case = plain_case(world_size)
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    given = []
    for partition in case.partitions:
        own = torch.cat([shard.edge_features["_ID"] for shard in partition.all_shard_edges])
        given.append((partition, own[::3], x[partition.node_features["orig_id"]]))
    model, results = LinkModel(), pool.run(train, per_rank=given)
    for (described, scores, _), (_, ids, _) in zip(results, given, strict=True):
        batch = check_batch(case, described, {E: case.edge_orig[ids]}, "self", [-1, -1])
        for mine, theirs in zip(scores, model.step(batch, x[batch[0]]), strict=True):
            assert_close(mine, theirs)
    for _, _, gradients in results:
        for name, value in parameter_gradients(model).items():
            assert_close(gradients[name], value)


def draw_pairs(mine):
    partition, etype = mine
    graph = sar.construct_full_graph(partition)
    seeds = {etype: torch.arange(graph.num_edges(etype))}
    sampler = sar.EdgePredictionSampler(sar.DistNeighborSampler([0]), negative_sampler=400)
    negative = sampler.sample(graph, seeds)[2]
    return negative.dstnodes[etype[2]].data[dgl.NID][negative.edges(etype=etype)[1]]


@pytest.mark.parametrize("etype", [BUYS, FOLLOWS])
@pytest.mark.parametrize("world_size", [3])
def test_negative_pairs_are_uniform_and_of_the_type(pool, world_size, etype):
    case = typed_case(world_size)
    drawn = pool.run(draw_pairs, per_rank=[(partition, etype) for partition in case.partitions])
    counts = torch.bincount(torch.cat(drawn), minlength=23)
    kinds = torch.cat([p.node_features["_TYPE"] for p in case.partitions])
    of_type = kinds == case.whole.ntypes.index(etype[2])
    assert counts[~of_type].sum() == 0
    assert stats.chisquare(counts[of_type].numpy()).pvalue > 1e-5


def back(partition, etype, reverse):
    graph = sar.construct_full_graph(partition)
    return graph.edges[etype].data[dgl.EID], sar.reverse_edges(graph, etype, reverse)


@pytest.mark.parametrize("etype, reverse", [(BUYS, BOUGHT), (BOUGHT, BUYS), (FOLLOWS, None)])
@pytest.mark.parametrize("world_size", [1, 3])
def test_reverse_edges(pool, world_size, etype, reverse):
    case = typed_case(world_size)
    results = pool.run(back, etype, reverse, per_rank=case.partitions)
    ids, found = (torch.cat(columns) for columns in zip(*results, strict=True))
    original = case.edge_orig[ids]
    assert torch.equal(original.sort().values, torch.arange(len(ids)))
    if reverse is not None:
        assert torch.equal(case.edge_orig[found], original), "edge for edge, also of several alike"
        return
    ends = [tuple(pair) for pair in torch.stack(case.whole.edges(etype=etype), 1).tolist()]
    there = found >= 0
    assert len(found[there].unique()) == int(there.sum())
    for edge, other in zip(original[there].tolist(), case.edge_orig[found[there]].tolist(), strict=True):
        assert ends[edge] == ends[other][::-1]
    counts = Counter(ends)
    assert int(there.sum()) == sum(min(number, counts[pair[::-1]]) for pair, number in counts.items()) > 0


def refused(mine, how):
    partition, wrong = mine
    graph = sar.construct_full_graph(partition)
    own, options = graph.edges[BUYS].data[dgl.EID], {"exclude": "self"}
    if how == "alone":
        options = {"exclude": "reverse_types", "reverse_etypes": {"follows": "follows"}}
        own = graph.edges[FOLLOWS].data[dgl.EID]
    elif how == "shape":
        options = {"exclude": "reverse_id", "reverse_eids": {BUYS: own[wrong:]}}
    elif how == "settings" and wrong:
        options = {"exclude": None}
    seeds = own
    if wrong:
        seeds = {
            "unknown": torch.tensor([120]),
            "negative": torch.tensor([-1]),
            "twice": own[[0, 0]],
            "foreign": torch.tensor([119]),
            "split": torch.tensor([119]),
            "row": {BUYS: torch.tensor([99])},
            "type": {"sells": torch.tensor([0])},
            "mask": torch.ones(3, dtype=torch.bool),
        }.get(how, own)
    if how == "split":
        return catch_and_recover(sar.split_edges, graph, seeds)
    sampler = sar.EdgePredictionSampler(sar.DistNeighborSampler([1]), **options)
    return catch_and_recover(lambda: sar.DataLoader(graph, seeds, sampler, foreign_seeds=how == "unknown"))


REFUSED = {
    "unknown": "such as 120, are not edges of the graph",
    "negative": "-1",
    "twice": "given twice",
    "foreign": "foreign_seeds=True",
    "split": "such as 119, are not edges into",
    "row": "rows",
    "type": "sells",
    "mask": "name one of",
    "alone": "no edge back",
    "shape": "reverse_eids",
    "settings": "exclude",
}


@pytest.mark.parametrize("how, words", REFUSED.items())
@pytest.mark.parametrize("world_size", [2])
def test_wrong_edges_on_one_worker_are_an_error_on_all(pool, world_size, how, words):
    partitions = typed_case(world_size).partitions
    for failure in pool.run(refused, how, per_rank=list(zip(partitions, (1, 0), strict=True))):
        assert words in require(failure).message
        assert "SarError" in failure.bases


NOT_UNIFORM = dgl.dataloading.negative_sampler.GlobalUniform(2)


@pytest.mark.parametrize(
    "options",
    [
        *({"exclude": rule} for rule in ("all", "reverse_id", "reverse_types")),
        *({"negative_sampler": bad} for bad in (-1, 1.5, True, {BUYS: -1}, NOT_UNIFORM)),
    ],
    ids=range(8),
)
def test_bad_settings_are_refused_at_once(options):
    with pytest.raises(sar.SarError, match=r"exclude|negative_sampler"):
        sar.EdgePredictionSampler(sar.DistNeighborSampler([1]), **options)
