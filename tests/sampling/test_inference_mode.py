"""Sampling with features that were made in inference mode, which have no versions, and sampling inside of it."""

import pytest
import torch

import sar
from tests.matrix import THREAD
from tests.sampling.cases import features_of
from tests.sampling.scenes import parts_of


def sample(partition, num_workers):
    """Whether features are right in an epoch, after a change in place, in inference mode, and after it."""
    graph = sar.construct_full_graph(partition)
    with torch.inference_mode():
        features = features_of(graph.node_ids())
        graph.edata["e"] = graph.edata["_ID"].double()
    sampler = sar.DistNeighborSampler([2], input_node_features={"x": features}, output_node_features={"y": features})
    loader = sar.DataLoader(
        graph, graph.node_ids(), sampler, 3, precompute_optimized_batches=False, num_workers=num_workers
    )

    def right(change):
        return [
            torch.equal(block.srcdata["x"], features_of(block.srcdata["_ID"]) + change)
            and torch.equal(block.dstdata["y"], features_of(block.dstdata["_ID"]) + change)
            and torch.equal(block.edata["e"], block.edata["_ID"].double())
            for [block] in loader
        ]

    found = right(0)
    with torch.inference_mode():
        features += 1
    found += right(1)
    with torch.inference_mode():
        found += right(1)
    return found + right(1)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=[pytest.mark.slow, THREAD])])
@pytest.mark.parametrize("world_size", [2])
def test_features_of_inference_mode(pool, num_workers):
    for found in pool.run(sample, num_workers, per_rank=parts_of([7, 5]).partitions, timeout=120):
        assert len(found) == 12
        assert all(found)
