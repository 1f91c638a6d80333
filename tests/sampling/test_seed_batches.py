"""`SeedBatches`: as many batches on every worker, each seed once an epoch, and the same again for the same epoch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import data as torch_data

import sar
from sar.sampling import SeedBatches
from tests.core.attempts import catch_and_recover, require
from tests.sampling.scenes import parts_of

EPOCHS = (0, 1, 2)


def batches(mine, batch_size, drop_last, shuffle, optimized):
    """The number of batches, and the batches of some epochs; epoch 1 of another object first."""
    partition, seeds = mine
    graph = sar.construct_full_graph(partition)

    def make(seed):
        return SeedBatches(
            seeds,
            batch_size,
            drop_last=drop_last,
            shuffle=shuffle,
            seed=seed,
            optimized=graph if optimized else None,
        )

    made = make(5)
    epochs = [made.epoch(number) for number in EPOCHS]
    again = make(5).epoch(1)
    assert all(map(torch.equal, again, epochs[1])), "an epoch's batches depend on its number only"
    return len(made), epochs, make(6).epoch(1)


@settings(max_examples=15)
@given(data=st.data())
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_number_sizes_and_order(pool, world_size, data):
    counts = data.draw(st.lists(st.integers(0, 23), min_size=world_size, max_size=world_size))
    parts = parts_of([count + 2 for count in counts])
    size = data.draw(st.integers(1, 9))
    drop_last, shuffle, optimized = (data.draw(st.booleans()) for _ in range(3))
    generator = torch.Generator().manual_seed(0)
    seeds = [
        first + torch.randperm(last - first, generator=generator)[:-2]
        for first, last in parts.partitions[0].node_ranges
    ]
    mine = list(zip(parts.partitions, seeds, strict=True))
    results = pool.run(batches, size, drop_last, shuffle, optimized, per_rank=mine)
    expected = min(counts) // size if drop_last else -(-max(counts) // size)
    for own, (number, epochs, _) in zip(seeds, results, strict=True):
        assert number == expected
        assert [len(epoch) for epoch in epochs] == [expected] * len(EPOCHS)
        for epoch in epochs:
            check_epoch(own, epoch, size, drop_last)
        if not shuffle:
            assert all(map(torch.equal, epochs[0], epochs[1]))
        if not optimized and not shuffle:
            assert torch.equal(torch.cat([own[:0], *epochs[0]]), own[: sum(map(len, epochs[0]))]), "as they come"


def check_epoch(own, epoch, size, drop_last):
    together = torch.cat([own[:0], *epoch])
    lengths = sorted(map(len, epoch))
    assert len(together.unique()) == len(together), "no seed twice"
    assert bool(torch.isin(together, own).all())
    if drop_last:
        assert lengths == [size] * len(epoch)
        return
    assert len(together) == len(own), "every seed"
    if -(-len(own) // size) == len(epoch):  # as many batches as this worker needs
        assert lengths[1:] == [size] * (len(epoch) - 1)
    else:
        assert lengths[-1] - lengths[0] <= 1


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1])
def test_one_worker_cuts_as_torchs_loader(pool, drop_last):
    parts = parts_of([23])
    [(number, epochs, _)] = pool.run(
        batches, 5, drop_last, False, False, per_rank=[(parts.partitions[0], torch.arange(23))]
    )
    expected = list(torch_data.DataLoader(torch.arange(23), 5, drop_last=drop_last))
    assert number == len(expected)
    assert all(map(torch.equal, epochs[0], expected))


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("world_size", [2])
def test_shuffling(pool, optimized):
    """Epochs, seeds and workers have different orders; optimised batches stay together."""
    parts = parts_of([60, 60])
    seeds = [torch.arange(*ends) for ends in parts.partitions[0].node_ranges]
    results = pool.run(batches, 4, False, True, optimized, per_rank=list(zip(parts.partitions, seeds, strict=True)))
    for _, epochs, other_seed in results:
        orders = [torch.cat(epoch).tolist() for epoch in (*epochs, other_seed)]
        assert len(set(map(tuple, orders))) == 4
        together = [{frozenset(batch.tolist()) for batch in epoch} for epoch in (*epochs, other_seed)]
        assert (len(set(map(frozenset, together))) == 1) == optimized
    if not optimized:
        first, second = (torch.cat(epochs[0]) for _, epochs, _ in results)
        assert not torch.equal(first, second - 60)


def drop_and_shuffle(seeds, size):
    made = SeedBatches(seeds, size, drop_last=True, shuffle=True, seed=1)
    return torch.cat([batch for number in range(20) for batch in made.epoch(number)]).unique()


@pytest.mark.parametrize("world_size", [2])
def test_dropped_seeds_take_turns(pool):
    seeds = [torch.arange(11), torch.arange(11, 20)]
    found = pool.run(drop_and_shuffle, 4, per_rank=seeds)
    assert all(map(torch.equal, found, seeds))


def other_sizes():
    return catch_and_recover(SeedBatches, torch.arange(3), 2 + sar.rank()), len(SeedBatches(torch.arange(3), 2))


@pytest.mark.parametrize("world_size", [2])
def test_batches_of_other_sizes_are_an_error_on_all(pool):
    for failure, number in pool.run(other_sizes):
        assert require(failure).kind == "DisagreementError"
        assert number == 2, "works on"
