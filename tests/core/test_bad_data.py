"""`PartitionData` that cannot be used: `PartitionError` on the rank that has it, and an error on all others."""

import pytest
import torch

import sar
from sar.common_tuples import EID
from tests.core.attempts import Failure, catch_and_recover
from tests.parity.harness import build
from tests.parity.scenarios import SCENARIOS


def build_then_build(bad, good):
    sar.Config.timeout = 10
    failure = catch_and_recover(build, bad, 1)
    return failure, build(good, 1).num_edges_global()


def replace_shard(partition, source, **changes):
    shards = list(partition.all_shard_edges)
    shards[source] = shards[source]._replace(**changes)
    return partition._replace(all_shard_edges=shards)


def with_feature(partition, source, make, dtype=torch.float32):
    """One shard with a feature w of `make(edges)` rows."""
    shard = partition.all_shard_edges[source]
    rows = torch.rand(make(len(shard.edges[0])), dtype=dtype)
    return replace_shard(partition, source, edge_features=shard.edge_features | {"w": rows})


def with_edges(partition, source, change):
    return replace_shard(partition, source, edges=change(*partition.all_shard_edges[source].edges))


def one_partition_too_many(partition):
    return partition._replace(
        node_ranges=[*partition.node_ranges, (40, 40)],
        all_shard_edges=[*partition.all_shard_edges, partition.all_shard_edges[0]],
    )


BAD = {
    "a short feature": (lambda mine: with_feature(mine, 0, lambda edges: edges - 1), ("'w'", "expected")),
    "a feature of one shard": (lambda mine: with_feature(mine, 1, int), ("'w'", "missing")),
    "unlike dtypes": (
        lambda mine: with_feature(with_feature(mine, 0, int), 1, int, torch.float64),
        ("'w'", "dtype"),
    ),
    "sources of another partition": (
        lambda mine: with_edges(mine, 0, lambda src, dst: (src + 30, dst)),
        ("sources", "expected"),
    ),
    "destinations out of range": (
        lambda mine: with_edges(mine, 1, lambda src, dst: (src, dst + 40)),
        ("destinations", "expected"),
    ),
    "fewer destinations": (
        lambda mine: with_edges(mine, 1, lambda src, dst: (src, dst[:-1])),
        ("sources", "destinations"),
    ),
    "one partition too many": (one_partition_too_many, ("3", "2", "workers")),
    "unsorted ranges": (lambda mine: mine._replace(node_ranges=[(0, 10), (15, 40)]), ("expected",)),
}
"""What is wrong with a partition, and words of the error."""


@pytest.mark.parametrize("spoil", BAD)
@pytest.mark.parametrize("world_size", [2])
def test_bad_data_on_one_rank(pool, spoil):
    parts = SCENARIOS["random"](2)
    results = pool.run(_build_mine, spoil, per_rank=parts.partitions)
    (first, edges), (second, _) = results
    assert isinstance(second, Failure), "the bad partition was accepted"
    assert second.kind in ("PartitionError", "DisagreementError"), second
    if second.kind == "PartitionError":
        for word in BAD[spoil][1]:
            assert word.lower() in second.message.lower(), second.message
    assert first is not None, "the others went on"
    assert first.kind in ("PeerError", "DisagreementError", "PartitionError"), first
    assert first.kind != "PeerError" or "worker 1 raised partitionerror" in first.message.lower(), first.message
    assert edges == len(parts.src), "good data is accepted afterwards"


def _build_mine(good, spoil):
    bad = BAD[spoil][0](good) if sar.rank() == 1 else good
    return build_then_build(bad, good)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("world_size", [2])
def test_another_number_of_partitions_than_workers(pool, workers):
    parts, good = SCENARIOS["random"](workers), SCENARIOS["random"](2)
    pairs = [(parts.partitions[min(rank, workers - 1)], good.partitions[rank]) for rank in range(2)]
    for failure, _ in pool.run(_build_pair, per_rank=pairs):
        assert failure.kind in ("PartitionError", "PeerError")
        assert f"{workers} " in failure.message
        assert "2 workers" in failure.message.replace("2 \nworkers", "2 workers")
        assert "as many workers as" in failure.message, "the mend"


def _build_pair(pair):
    return build_then_build(*pair)


def shuffled_edges(partition):
    """The same shards in another order, without `_ID`: sorted by destination, then as given."""
    graph = build(partition, 1)
    return graph.edata["w"], graph.edata[EID]


@pytest.mark.parametrize("world_size", [1, 2])
def test_edges_in_another_order_are_brought_into_the_visible_one(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    weights = torch.rand(len(parts.src))
    shuffled = []
    for partition, values in zip(parts.partitions, parts.split_edges(weights), strict=True):
        pieces = values.split([len(shard.edges[0]) for shard in partition.all_shard_edges])
        for source, (shard, piece) in enumerate(zip(partition.all_shard_edges, pieces, strict=True)):
            order = torch.randperm(len(piece), generator=torch.Generator().manual_seed(source))
            features = {name: column[order] for name, column in (shard.edge_features | {"w": piece}).items()}
            edges = (shard.edges[0][order], shard.edges[1][order])
            partition = replace_shard(partition, source, edges=edges, edge_features=features)
        shuffled.append(partition)
    results = pool.run(shuffled_edges, per_rank=shuffled)
    assert torch.equal(torch.cat([w for w, _ in results]), weights)
    for partition, (_, ids) in zip(parts.partitions, results, strict=True):
        assert torch.equal(ids, torch.cat([shard.edge_features[EID] for shard in partition.all_shard_edges]))
