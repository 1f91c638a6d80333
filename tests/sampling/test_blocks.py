"""`DistNeighborSampler.sample`: blocks are those of the graph, whatever its partitioning, and refuse bad requests."""

import pytest
import torch

import sar
from tests.parity.scenarios import SCENARIOS
from tests.parity.blocks import some_seeds
from tests.sampling.cases import add_edge_feature, check_blocks, describe, node_features


def sample(mine, fanouts, options):
    partition, seeds = mine
    graph = sar.construct_full_graph(partition)
    add_edge_feature(graph)
    features = node_features(partition)
    sampler = sar.DistNeighborSampler(
        fanouts, input_node_features={"x": features}, output_node_features={"_N/y": features}, **options
    )
    return describe(sampler.sample(graph, seeds))


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_blocks_of_every_graph(pool, world_size, scenario, replace):
    parts = SCENARIOS[scenario](world_size)
    for how in ("all", "uneven", "last only"):
        seeds = some_seeds(parts, how)
        fanouts = [3, -1, 2]
        given = list(zip(parts.partitions, seeds, strict=True))
        for rank, described in enumerate(pool.run(sample, fanouts, {"replace": replace}, per_rank=given)):
            check_blocks(parts, described, seeds[rank], fanouts, replace)
