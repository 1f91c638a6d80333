"""A mini-batch in plain tensors: what all workers sample together, before it becomes blocks of a library."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from sar.comm.group import Group
from sar.kernels.neighbor_sampling import derive_key
from sar.sampling.batch_features import BatchFeatures, FeatureCache, fetch_features
from sar.sampling.neighbors import SampledLayer
from sar.sampling.pairs import Pairs, PairSettings, draw_pairs
from sar.sampling.worker_graph import WorkerGraph

PAIRS: Final = 2**32
"""The number of the pairs' key among those of a batch; layers have those from 0 on."""


class SamplingMethod(Protocol):
    """How the layers of a batch are drawn: plain data, which travels to background processes."""

    def draw(
        self, group: Group, graph: WorkerGraph, seeds: Mapping[str, Tensor], key: int, exclude: Tensor | None
    ) -> list[SampledLayer]:
        """The layers, input layer first; by all workers together, inside `group.guard()`.

        Args:
            group: the workers, which have agreed on the batch.
            graph: this worker's part of the graph.
            seeds: of every node type, (S,) int64; may be empty.
            key: 63 bits that belong to this worker and batch.
            exclude: (X,) int64 IDs of edges to leave out; None for none.
        """


@dataclass(frozen=True)
class SamplingSource:
    """What to sample from, and how.

    graph: this worker's part of the graph.
    method: draws the layers.
    cache: of input features; None for none.
    pairs: what is drawn for seeds that are edges; None where they are nodes, or what else the method takes.
    """

    graph: WorkerGraph
    method: SamplingMethod
    cache: FeatureCache | None
    pairs: PairSettings | None = None


class Batch(NamedTuple):
    """A sampled mini-batch; input layer first; with the pairs of nodes that its seeds join, where these are edges."""

    layers: list[SampledLayer]
    features: BatchFeatures
    pairs: Pairs | None
    num_nodes: int  # of the whole graph


def random_key() -> int:
    """A key drawn from torch's random state."""
    return int(torch.randint(2**63 - 1, ()))


def sample_batch(group: Group, source: SamplingSource, seeds: Tensor, key: int) -> Batch:
    """Sample a batch, by all workers together.

    Args:
        group: the workers.
        source: with equal settings on all workers.
        seeds: distinct, (S,) int64, what the method takes, such as global IDs; or rows of seed edges ([Note: seed
            edges]). May be empty.
        key: 63 bits that belong to this worker and batch.
    """
    graph = source.graph
    with group.guard():
        group.agree(f"{graph.signature}: a batch of {source.pairs or 'nodes'}")
        pairs, exclude = None, None
        if source.pairs is None:
            by_type = graph.by_type(seeds)
        else:
            pairs = draw_pairs(group, graph, seeds, source.pairs, derive_key(key, PAIRS))
            by_type, exclude = pairs.nodes, pairs.exclude
        layers = source.method.draw(group, graph, by_type, key, exclude)
        outputs = {ntype: nodes[: layers[-1].num_dst[ntype]] for ntype, nodes in layers[-1].nodes.items()}
        features = fetch_features(group, graph, layers[0].nodes, outputs, source.cache)
        return Batch(layers, features, pairs, graph.num_nodes)
