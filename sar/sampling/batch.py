"""A mini-batch in plain tensors: what all workers sample together, before it becomes blocks of a library."""

from typing import NamedTuple

import torch
from torch import Tensor

from sar.comm.group import Group
from sar.kernels.neighbor_sampling import derive_key
from sar.sampling.feature_cache import FeatureCache
from sar.sampling.features import Fetched, fetch_features
from sar.sampling.hops import Hop, sample_hop
from sar.sampling.local_graph import LocalGraph


class Source(NamedTuple):
    """What to sample, and from what.

    graph: this worker's part of the graph.
    fanouts: for every layer, input layer first, the edges to draw at a node for every edge type.
    replace: draw with replacement.
    cache: of input features; None for none.
    """

    graph: LocalGraph
    fanouts: list[list[int]]
    replace: bool
    cache: FeatureCache | None


class Batch(NamedTuple):
    """A sampled mini-batch; input layer first."""

    hops: list[Hop]
    features: Fetched


def random_key() -> int:
    """A key drawn from torch's random state."""
    return int(torch.randint(2**63 - 1, ()))


def sample_batch(group: Group, source: Source, seeds: Tensor, key: int) -> Batch:
    """Sample a batch, by all workers together.

    Args:
        group: to talk to the other workers.
        source: with equal settings on all workers.
        seeds: distinct global IDs, (S,) int64; may be empty.
        key: 63 bits that belong to this worker and batch.
    """
    graph = source.graph
    with group.guard():
        group.agree(f"{graph.signature}: a batch")
        destinations = graph.by_type(seeds)
        outputs = destinations
        hops: list[Hop] = []
        for layer, fanouts in reversed(list(enumerate(source.fanouts))):
            words = f"{graph.signature}, layer {layer}"
            hop = sample_hop(group, graph, destinations, fanouts, source.replace, derive_key(key, layer), words)
            destinations = hop.nodes
            hops.insert(0, hop)
        return Batch(hops, fetch_features(group, graph, destinations, outputs, source.cache, graph.signature))
