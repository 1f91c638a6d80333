"""A mini-batch in plain tensors: what all workers sample together, before it becomes blocks of a library."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sar.comm.group import Group
from sar.kernels.neighbor_sampling import derive_key
from sar.sampling.batch_features import BatchFeatures, FeatureCache, fetch_features
from sar.sampling.neighbors import Draws, SampledLayer, sample_layer
from sar.sampling.pairs import Pairs, PairSettings, draw_pairs
from sar.sampling.worker_graph import WorkerGraph


@dataclass(frozen=True)
class SamplingSource:
    """What to sample, and from what.

    graph: this worker's part of the graph.
    fanouts: for every layer, input layer first, the edges to draw at a node for every edge type.
    replace: draw with replacement.
    cache: of input features; None for none.
    pairs: what is drawn for seeds that are edges; None where they are nodes.
    """

    graph: WorkerGraph
    fanouts: list[list[int]]
    replace: bool
    cache: FeatureCache | None
    pairs: PairSettings | None = None


class Batch(NamedTuple):
    """A sampled mini-batch; input layer first; with the pairs of nodes that its seeds join, where these are edges."""

    layers: list[SampledLayer]
    features: BatchFeatures
    pairs: Pairs | None


def random_key() -> int:
    """A key drawn from torch's random state."""
    return int(torch.randint(2**63 - 1, ()))


def sample_batch(group: Group, source: SamplingSource, seeds: Tensor, key: int) -> Batch:
    """Sample a batch, by all workers together.

    Args:
        group: the workers.
        source: with equal settings on all workers.
        seeds: distinct global IDs, (S,) int64, or rows of seed edges ([Note: seed edges]); may be empty.
        key: 63 bits that belong to this worker and batch.
    """
    graph = source.graph
    with group.guard():
        group.agree(f"{graph.signature}: a batch of {source.pairs or 'nodes'}")
        pairs, exclude = None, None
        if source.pairs is None:
            outputs = graph.by_type(seeds)
        else:
            pairs = draw_pairs(group, graph, seeds, source.pairs, derive_key(key, len(source.fanouts)))
            outputs, exclude = pairs.nodes, pairs.exclude
        destinations = outputs
        layers: list[SampledLayer] = []
        for number in reversed(range(len(source.fanouts))):
            draws = Draws(source.fanouts[number], source.replace, derive_key(key, number), exclude)
            layer = sample_layer(group, graph, destinations, draws, f"{graph.signature}, layer {number}")
            destinations = layer.nodes
            layers.insert(0, layer)
        return Batch(layers, fetch_features(group, graph, destinations, outputs, source.cache), pairs)
