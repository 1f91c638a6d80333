"""`split_seeds`: equal shares, each seed once, and no split into equal shares has fewer foreign seeds."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sar
from sar.sampling.seeds import plan_moves
from tests.core.attempts import catch_and_recover
from tests.sampling.scenes import global_ids, parts_of, typed_parts


def fewest_foreign(counts):
    """By trying every way of giving seeds to workers whose shares differ by one at most."""
    owners = [worker for worker, count in enumerate(counts) for _ in range(count)]
    workers = range(len(counts))
    return min(
        sum(owner != worker for owner, worker in zip(owners, given_to, strict=True))
        for given_to in product(workers, repeat=len(owners))
        if max(map(given_to.count, workers)) - min(map(given_to.count, workers)) <= 1
    )


SMALL = [counts for workers in (1, 2, 3) for counts in product(range(6), repeat=workers) if sum(counts) <= 6]


@pytest.mark.parametrize("counts", SMALL, ids=str)
def test_no_other_split_has_fewer_foreign_seeds(counts):
    moves = plan_moves(counts)
    assert sum(map(sum, moves)) - sum(moves[p][p] for p in range(len(counts))) == fewest_foreign(counts)


def split(mine):
    """The share of seeds in two orders, and of a mask."""
    partition, seeds, mask = mine
    graph = sar.construct_full_graph(partition)
    return [sar.split_seeds(graph, given) for given in (seeds, seeds.flip(0), mask)]


@settings(max_examples=15)
@given(data=st.data())
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_on_workers(pool, world_size, data):
    masks = data.draw(st.lists(st.lists(st.booleans(), max_size=12), min_size=world_size, max_size=world_size))
    parts = parts_of([len(mask) for mask in masks])
    whole = torch.tensor([chosen for mask in masks for chosen in mask], dtype=torch.bool)
    masks = parts.split_nodes(whole)
    firsts = [first for first, _ in parts.partitions[0].node_ranges]
    seeds = [mask.nonzero().squeeze(1) + first for mask, first in zip(masks, firsts, strict=True)]
    results = pool.run(split, per_rank=list(zip(parts.partitions, seeds, masks, strict=True)))
    shares = [share for share, _, _ in results]
    assert all(torch.equal(share, other) for share, *others in results for other in others), "order does not matter"
    assert torch.equal(torch.cat(shares).sort().values, whole.nonzero().squeeze(1)), "each seed once"
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    for share, own in zip(shares, seeds, strict=True):
        assert int(torch.isin(share, own).sum()) == min(len(share), len(own))


def split_typed(mine):
    partition, rows = mine
    graph = sar.construct_full_graph(partition)
    masks = {ntype: torch.zeros(graph.num_nodes(ntype), dtype=torch.bool) for ntype in rows}
    for ntype, index in rows.items():
        masks[ntype][index] = True
    return sar.split_seeds(graph, rows), sar.split_seeds(graph, masks)


@pytest.mark.parametrize("world_size", [1, 3])
def test_seeds_by_type(pool, world_size):
    parts = typed_parts(world_size)
    users, items = global_ids(parts, "user"), global_ids(parts, "item")
    rows = [{"item": torch.arange(len(i)), "user": torch.tensor([0])} for i in items]
    results = pool.run(split_typed, per_rank=list(zip(parts.partitions, rows, strict=True)))
    expected = torch.cat([*items, *(ids[:1] for ids in users)]).sort().values
    assert torch.equal(torch.cat([share for share, _ in results]).sort().values, expected)
    assert all(torch.equal(share, masked) for share, masked in results)


def refused(mine):
    partition, wrong = mine
    graph = sar.construct_full_graph(partition)
    seeds = torch.arange(*graph.node_ranges[sar.rank()])
    failure = catch_and_recover(sar.split_seeds, graph, seeds if wrong is None else wrong)
    return failure, len(sar.split_seeds(graph, seeds))


@pytest.mark.parametrize(
    "wrong, words",
    [
        (torch.tensor([3, 0]), "such as 0"),
        ({"_N": torch.tensor([3])}, "rows"),
        ({"paper": torch.tensor([0])}, "paper"),
    ],
    ids=["foreign", "row", "type"],
)
@pytest.mark.parametrize("world_size", [2])
def test_wrong_seeds_on_one_worker_are_an_error_on_all(pool, wrong, words):
    parts = parts_of([3, 3])
    found = pool.run(refused, per_rank=[(parts.partitions[0], None), (parts.partitions[1], wrong)])
    assert [failure.kind for failure, _ in found] == ["PeerError", "GraphError"]
    assert all(words in failure.message and share == 3 for failure, share in found)  # and the next call works
