"""Batches of seeds that lie close together: exact sizes, and the communities of planted graphs."""

import pytest
import torch

import sar
from sar.errors import PartitionError
from sar.sampling import SeedBatches
from sar.sampling.seeds import seed_parts
from tests.graphs import EdgeList, partition_in_memory
from tests.sampling.scenes import global_ids, typed_parts

GROUP = 6


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


def group(mine, size, **options):
    partition, seeds = mine
    graph = sar.construct_full_graph(partition)
    made = SeedBatches(seeds, size, optimized=graph, **options)
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
    assert pool.run(shuffled, tmp_path, per_rank=mine) == [([False, True, True], 0)]


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
    monkeypatch.setattr("sar.partition.assign.metis._OK", -1)
    with pytest.raises(PartitionError, match="METIS finds no 2 parts"):
        seed_parts(torch.tensor([0, 1]), torch.tensor([1, 2]), torch.ones(3, dtype=torch.bool), 2)


def test_seeds_that_nothing_joins_stay_in_order():
    loops = torch.arange(3)
    assert seed_parts(loops, loops, torch.ones(3, dtype=torch.bool), 2) is None
