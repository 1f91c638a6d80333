"""Batches of seeds that lie close together: exact sizes, the communities of planted graphs, and the file of them."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sar
from sar.errors import PartitionError
from sar.sampling import OptimizedBatches, SeedBatches, seed_batches
from sar.sampling.seed_batches import fit, seed_parts
from tests.core.attempts import catch_and_recover, require
from tests.graphs import EdgeList, partition_in_memory
from tests.sampling.scenes import global_ids, parts_of, typed_parts

GROUP = 6


@given(st.data())
def test_fit_moves_as_few_as_can_be_and_those_with_fewest_neighbours_in_their_batch(data):
    wanted = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    batch = st.integers(0, len(wanted) - 1)
    before = torch.tensor(data.draw(st.lists(batch, min_size=sum(wanted), max_size=sum(wanted))), dtype=torch.int64)
    edges = data.draw(
        st.lists(st.tuples(st.integers(0, max(sum(wanted) - 1, 0)), batch), max_size=30 if sum(wanted) else 0)
    )
    seed, neighbour = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).unbind(1)
    after = fit(before, seed, neighbour, wanted)
    sizes = torch.bincount(before, minlength=len(wanted)).tolist()
    assert torch.bincount(after, minlength=len(wanted)).tolist() == wanted
    moved = before != after
    assert int(moved.sum()) == sum(max(0, size - target) for size, target in zip(sizes, wanted, strict=True))
    ties = torch.zeros(len(before), dtype=torch.int64).index_add_(0, seed, (before[seed] == neighbour).long())
    for number in range(len(wanted)):
        gone, stayed = ties[moved & (before == number)], ties[~moved & (before == number)]
        assert not len(gone) or not len(stayed) or gone.max() <= stayed.min()


def test_a_seed_moves_to_where_most_of_its_neighbours_are():
    before = torch.tensor([0, 0, 0, 0, 1, 2])
    edges = torch.tensor([[0, 0], [0, 0], [1, 0], [1, 0], [2, 1], [2, 2], [2, 2], [3, 1], [3, 1], [3, 1]])
    assert fit(before, edges[:, 0], edges[:, 1], [2, 2, 2]).tolist() == [0, 0, 2, 1, 1, 2]


def cliques(count):
    """Nodes in groups of `GROUP`, mixed up, with all edges inside each group."""
    pairs = torch.cartesian_prod(torch.arange(GROUP), torch.arange(GROUP))
    edges = torch.cat([pairs[pairs[:, 0] != pairs[:, 1]] + GROUP * k for k in range(count)])
    name = torch.randperm(GROUP * count, generator=torch.Generator().manual_seed(1))
    return EdgeList(name[edges[:, 0]], name[edges[:, 1]], GROUP * count), [
        frozenset(name[GROUP * k : GROUP * (k + 1)].tolist()) for k in range(count)
    ]


def readers(count):
    """Groups of seeds without edges among them; each group reads a node of its own, which is the last of all nodes."""
    name = torch.randperm(GROUP * count, generator=torch.Generator().manual_seed(2))
    hubs = GROUP * count + torch.arange(count)
    return EdgeList(hubs.repeat_interleave(GROUP), name, GROUP * count + count), [
        frozenset(name[GROUP * k : GROUP * (k + 1)].tolist()) for k in range(count)
    ]


def group(mine, size, cache=None, **options):
    partition, seeds = mine
    graph = sar.construct_full_graph(partition)
    made = SeedBatches(seeds, size, optimized=OptimizedBatches(graph, cache), node_ranges=graph.node_ranges, **options)
    return made.epoch(0)


@pytest.mark.parametrize("remote", [False, True], ids=["own", "remote"])
@pytest.mark.parametrize("make", [cliques, readers])
@pytest.mark.parametrize("world_size", [2])
def test_planted_groups_become_batches(pool, make, remote):
    """With `remote`, worker 1 owns what the seeds of `readers` read; otherwise worker 0 has all nodes."""
    edges, groups = make(8)
    num_seeds = GROUP * 8
    assignment = (torch.arange(edges.num_nodes) >= (num_seeds if remote else edges.num_nodes)).long()
    parts = partition_in_memory(edges, assignment, 2)
    mine = list(zip(parts.partitions, [torch.arange(num_seeds), torch.arange(0)], strict=True))
    epoch = pool.run(group, GROUP, per_rank=mine)[0]
    assert {frozenset(batch.tolist()) for batch in epoch} == set(groups)


def shuffled(mine, folder):
    """For each way to ask, whether two epochs have the same batches, in any order; and the files made."""
    partition, seeds = mine
    graph, sampler = sar.construct_full_graph(partition), sar.DistNeighborSampler([1])
    ways = [{}, {"precompute_optimized_batches": True}, {"optimized_batches_cache": folder / "batches"}]
    same = []
    for way in ways:
        loader = sar.DataLoader(graph, seeds, sampler, GROUP, shuffle=True, seed=1, **way)
        epochs = [{frozenset(blocks[-1].dstdata["_ID"].tolist()) for blocks in loader} for _ in range(2)]
        same.append(epochs[0] == epochs[1])
    return same, len(list(folder.iterdir()))


@pytest.mark.parametrize("world_size", [1])
def test_only_who_asks_gets_the_same_batches_in_all_epochs(pool, tmp_path):
    edges, _ = cliques(8)
    parts = partition_in_memory(edges, torch.zeros(edges.num_nodes, dtype=torch.int64), 1)
    mine = [(parts.partitions[0], torch.arange(GROUP * 8))]
    assert pool.run(shuffled, tmp_path, per_rank=mine) == [([False, True, True], 1)]


def group_typed(mine):
    partition, seeds = mine
    return group((partition, seeds), 4), group((partition, seeds), 4, drop_last=True)


@pytest.mark.parametrize("world_size", [1, 2])
def test_several_types(pool, world_size):
    parts = typed_parts(world_size)
    seeds = [torch.cat(ids) for ids in zip(global_ids(parts, "user"), global_ids(parts, "item"), strict=True)]
    results = pool.run(group_typed, per_rank=list(zip(parts.partitions, seeds, strict=True)))
    for own, (epoch, whole) in zip(seeds, results, strict=True):
        assert torch.equal(torch.cat(epoch).sort().values, own.sort().values)
        assert {len(batch) for batch in whole} == {4}
    assert len({len(epoch) for epoch, _ in results}) == 1


# -- the file


def with_counted_metis(mine, size, cache):
    """The batches, how often METIS ran for them, and what the log warned of."""
    calls, warnings = [], []
    metis, warn = seed_batches.seed_parts, sar.logger.warning
    seed_batches.seed_parts = lambda *args: calls.append(1) or metis(*args)
    sar.logger.warning = lambda text, *args: warnings.append(text % args)
    try:
        return group(mine, size, cache), len(calls), warnings
    finally:
        seed_batches.seed_parts, sar.logger.warning = metis, warn


def truncated(file):
    file.write_bytes(file.read_bytes()[:-30])


def emptied(file):
    file.write_bytes(b"")


def other_sizes(file):
    with np.load(file, allow_pickle=False) as arrays:
        np.savez(file, key=arrays["key"], batch_of=np.zeros_like(arrays["batch_of"]))


def negative(file):
    with np.load(file, allow_pickle=False) as arrays:
        np.savez(file, key=arrays["key"], batch_of=arrays["batch_of"] - 1)


def lacking(file):
    with np.load(file, allow_pickle=False) as arrays:
        np.savez(file, key=arrays["key"])


class Trap:
    """Ends the process where it is unpickled."""

    def __reduce__(self):
        return os.abort, ()


def pickled(file):
    with np.load(file, allow_pickle=False) as arrays:
        np.savez(file, key=arrays["key"], batch_of=np.array([Trap()], dtype=object))


@pytest.mark.processes("counts calls in a process")
@pytest.mark.parametrize("world_size", [2])
def test_the_file(pool, tmp_path):
    parts, cache = parts_of([30, 20]), tmp_path / "new" / "batches.npz"
    seeds = [torch.arange(*ends) for ends in parts.partitions[0].node_ranges]
    mine = list(zip(parts.partitions, seeds, strict=True))

    def run(size=5, case=mine):
        results = pool.run(with_counted_metis, size, cache, per_rank=case)
        return [epoch for epoch, _, _ in results], [c for _, c, _ in results], [w for _, _, w in results]

    def same(first, second):
        return all(all(map(torch.equal, *epochs)) for epochs in zip(first, second, strict=True))

    first, calls, warnings = run()
    assert calls == [1, 1]
    assert warnings == [[], []]
    assert sorted(file.name for file in cache.parent.iterdir()) == ["batches-0-of-2.npz", "batches-1-of-2.npz"]
    again, calls, warnings = run()
    assert same(first, again)
    assert calls == [0, 0]

    file = cache.parent / "batches-1-of-2.npz"
    for damage in (truncated, emptied, other_sizes, negative, lacking, pickled):
        damage(file)
        mended, calls, warnings = run()
        assert same(first, mended), damage
        assert calls == [0, 1], damage
        assert [len(lines) for lines in warnings] == [0, 1], damage
        assert "damaged" in warnings[1][0]
        assert run()[1] == [0, 0], "mended"

    fewer = [(partition, own[2:]) for partition, own in mine]
    other = parts_of([30, 20], edges_per_node=4).partitions
    for size, case in ((6, mine), (5, fewer), (5, list(zip(other, seeds, strict=True)))):
        run()
        _, calls, warnings = run(size, case)
        assert calls == [1, 1]
        assert all("anew" in lines[0] for lines in warnings)
    assert not list(cache.parent.glob("*.tmp"))


def attempt(mine, cache):
    return catch_and_recover(group, mine, 5, cache), len(group(mine, 5))


@pytest.mark.parametrize("world_size", [2])
def test_a_file_that_cannot_be_written_is_an_error_on_all(pool, tmp_path):
    (tmp_path / "file").write_text("in the way of a folder")
    parts = parts_of([30, 20])
    seeds = [torch.arange(*ends) for ends in parts.partitions[0].node_ranges]
    mine = list(zip(parts.partitions, seeds, strict=True))
    for failure, number in pool.run(attempt, tmp_path / "file" / "x", per_rank=mine):
        assert "SarError" in require(failure).bases
        assert "optimized_batches_cache" in failure.message
        assert number == 6, "works on"


def test_parts_of_small_graphs_with_loops_and_parallel_edges():
    """On such graphs METIS corrupts memory, where it gets them as they are."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        seeds, others, edges = (int(torch.randint(1, most, (), generator=generator)) for most in (60, 30, 300))
        src = torch.randint(seeds + others, (edges,), generator=generator)
        dst = torch.randint(seeds, (edges,), generator=generator)
        num_parts = int(torch.randint(2, max(3, seeds), (), generator=generator))
        given = src, dst, torch.arange(seeds + others) < seeds, num_parts
        parts = seed_parts(*given)
        assert parts.shape == (seeds + others,)
        assert 0 <= int(parts.min()) <= int(parts.max()) < num_parts
        assert torch.equal(seed_parts(*given), parts)


def test_metis_that_finds_no_parts_is_told(monkeypatch):
    """Seeds used to come in the order of their IDs then, without a word."""
    monkeypatch.setattr("sar.partition.metis_library._OK", -1)
    with pytest.raises(PartitionError, match="METIS finds no 2 parts"):
        seed_parts(torch.tensor([0, 1]), torch.tensor([1, 2]), torch.ones(3, dtype=torch.bool), 2)


def test_seeds_that_nothing_joins_stay_in_order():
    loops = torch.arange(3)
    assert seed_parts(loops, loops, torch.ones(3, dtype=torch.bool), 2) is None
