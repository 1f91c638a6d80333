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


def short_feature(partition):
    shard = partition.all_shard_edges[0]
    features = shard.edge_features | {"w": torch.rand(len(shard.edges[0]) - 1)}
    return replace_shard(partition, 0, edge_features=features)


def feature_on_one_shard_only(partition):
    shard = partition.all_shard_edges[1]
    return replace_shard(partition, 1, edge_features=shard.edge_features | {"w": torch.rand(len(shard.edges[0]))})


def unlike_dtypes(partition):
    for source, dtype in enumerate((torch.float32, torch.float64)):
        shard = partition.all_shard_edges[source]
        features = shard.edge_features | {"w": torch.rand(len(shard.edges[0]), dtype=dtype)}
        partition = replace_shard(partition, source, edge_features=features)
    return partition


def source_of_another_partition(partition):
    src, dst = partition.all_shard_edges[0].edges
    return replace_shard(partition, 0, edges=(src + 30, dst))


def destination_out_of_range(partition):
    src, dst = partition.all_shard_edges[1].edges
    return replace_shard(partition, 1, edges=(src, dst + 40))


def fewer_destinations(partition):
    src, dst = partition.all_shard_edges[1].edges
    return replace_shard(partition, 1, edges=(src, dst[:-1]))


def one_partition_too_many(partition):
    return partition._replace(
        node_ranges=[*partition.node_ranges, (40, 40)],
        all_shard_edges=[*partition.all_shard_edges, partition.all_shard_edges[0]],
    )


def unsorted_ranges(partition):
    return partition._replace(node_ranges=[(0, 10), (15, 40)])


BAD = {
    short_feature: ("'w'", "expected"),
    feature_on_one_shard_only: ("'w'", "missing"),
    unlike_dtypes: ("'w'", "dtype"),
    source_of_another_partition: ("sources", "expected"),
    destination_out_of_range: ("destinations", "expected"),
    fewer_destinations: ("sources", "destinations"),
    one_partition_too_many: ("3", "2", "workers"),
    unsorted_ranges: ("expected",),
}


@pytest.mark.parametrize("spoil", BAD, ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("world_size", [2])
def test_bad_data_on_one_rank(pool, spoil):
    parts = SCENARIOS["random"](2)
    results = pool.run(_build_mine, spoil.__name__, per_rank=parts.partitions)
    (first, edges), (second, _) = results
    assert isinstance(second, Failure), "the bad partition was accepted"
    assert second.kind in ("PartitionError", "DisagreementError"), second
    if second.kind == "PartitionError":
        for word in BAD[spoil]:
            assert word.lower() in second.message.lower(), second.message
    assert first is not None, "the others went on"
    assert first.kind in ("PeerError", "DisagreementError", "PartitionError"), first
    assert first.kind != "PeerError" or "worker 1 raised partitionerror" in first.message.lower(), first.message
    assert edges == len(parts.src), "good data is accepted afterwards"


def _build_mine(good, spoil):
    bad = globals()[spoil](good) if sar.rank() == 1 else good
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
