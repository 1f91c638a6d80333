"""IDs of added self-loops: no edge gets one that another edge of any worker has or had."""

import pytest
import torch

import sar
from sar.common_tuples import EID, NID
from sar.errors import PartitionError
from tests.parity.harness import build, random_shares


def everywhere(rows):
    return torch.cat([each.cpu() for each in sar.comm.exchange_tensors([rows] * sar.world_size())])


def changed(mine):
    graph = build(mine[0], 1)
    known = before = everywhere(graph.edata[EID])
    steps = ["remove", "add", "remove", "add", "add", "remove", "remove", "add"]
    for step in steps:
        graph = getattr(graph, f"{step}_self_loop")()
        ids = everywhere(graph.edata[EID])
        assert len(ids.unique()) == len(ids) == graph.num_edges_global()
        new = ids[~torch.isin(ids, before)]
        assert len(new) == graph.num_nodes_global() * (step == "add")
        assert not torch.isin(new, known).any()
        known, before = torch.cat([known, new]), ids
    degrees = everywhere(graph.in_degrees())
    sampler = sar.EdgePredictionSampler(sar.DistNeighborSampler([-1]), exclude="self")
    for _, pairs, (block,) in sar.DataLoader(graph, graph.edata[EID], sampler, batch_size=50, seed=0):
        assert block.num_edges() == int(degrees[block.dstdata[NID]].sum()) - pairs.num_edges()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ids_are_never_given_twice(pool, world_size):
    pool.run(changed, per_rank=random_shares(world_size))


def some_without_ids(mine):
    partition, _ = mine
    for shard in partition.all_shard_edges:
        if sar.rank() == 0:
            shard.edge_features.pop(EID)
    with pytest.raises(PartitionError, match=r"have IDs \(_ID\) on some workers only"):
        sar.construct_full_graph(partition)


@pytest.mark.parametrize("world_size", [2])
def test_ids_on_some_workers_only_are_an_error(pool, world_size):
    pool.run(some_without_ids, per_rank=random_shares(world_size))
