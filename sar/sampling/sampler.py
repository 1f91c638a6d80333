"""Neighbor sampling: some in-edges of each node, layer by layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sar.comm.group import Group
from sar.common_tuples import CanonicalEtype
from sar.core.graph.graph import GraphShardManager
from sar.errors import ConfigError
from sar.kernels.neighbor_sampling import ALL, derive_key
from sar.sampling.batch_sampler import BatchSampler
from sar.sampling.neighbors import Draws, SampledLayer, sample_layer
from sar.sampling.worker_graph import WorkerGraph

Fanout = int | Mapping[str | CanonicalEtype, int]


@dataclass(frozen=True)
class Fanouts:
    """Draws layer after layer, from the seeds on; see `SamplingMethod`.

    fanouts: for every layer, input layer first, the edges to draw at a node for every edge type.
    replace: draw with replacement.
    """

    fanouts: list[list[int]]
    replace: bool

    def draw(
        self, group: Group, graph: WorkerGraph, seeds: Mapping[str, Tensor], key: int, exclude: Tensor | None
    ) -> list[SampledLayer]:
        """The layers of these seeds, distinct global IDs."""
        destinations = seeds
        layers: list[SampledLayer] = []
        for number in reversed(range(len(self.fanouts))):
            draws = Draws(self.fanouts[number], self.replace, derive_key(key, number), exclude)
            layer = sample_layer(group, graph, destinations, draws, f"{graph.signature}, layer {number}")
            destinations = layer.nodes
            layers.insert(0, layer)
        return layers


class DistNeighborSampler(BatchSampler):
    """Samples, for each node of a batch, some of its in-neighbours, and of these again: layers of blocks to train on.

    Each layer draws `fanout` in-edges of a node of each edge type, or all where there are no more, as
    `dgl.dataloading.NeighborSampler` does on one machine (Hamilton et al. 2017, "Inductive Representation Learning on
    Large Graphs"). Nodes may be on any worker.

    The blocks are ordinary `DGLBlock`s of this worker alone. `dgl.NID` are global node IDs, as in `node_ranges`;
    `dgl.EID` the graph's edge IDs, as in its `edata`. Destinations come first among the sources, seeds as given.

    Args:
        fanouts: for each layer, input layer first, the number of in-edges to draw at each node, -1 for all; or a
            dictionary with that number for every edge type.
        prob: edge field with the weights by which edges are drawn, (E,) or (E, 1), at least 0, in any unit; an edge of
            weight 0 never is. Edge types that lack it are drawn from evenly. Default: all edges alike.
        replace: draw with replacement: `fanout` edges of each node that has any.
        copy_edata: copy the graph's edge fields to the blocks; without, they have `dgl.EID` only.
        input_node_features: features of this worker's nodes by name, (N_i, ...) each, to set on the first block's
            sources. With several node types by `type/name`, (N_type, ...), as in `PartitionData.node_features`.
        output_node_features: likewise for the destinations of the last block, such as labels.
        output_device: where the blocks go; default the CPU.
        feature_cache_bytes: memory for input features of remote nodes that this worker's edges read most, which are
            then not fetched again. For features that do not change. Default: none.

    Raises:
        ConfigError: for arguments of another form.
    """

    def __init__(
        self,
        fanouts: Sequence[Fanout],
        prob: str | None = None,
        replace: bool = False,
        copy_edata: bool = True,
        input_node_features: Mapping[str, Tensor] | None = None,
        output_node_features: Mapping[str, Tensor] | None = None,
        output_device: torch.device | str | None = None,
        *,
        feature_cache_bytes: int = 0,
    ) -> None:
        if isinstance(fanouts, (str, Mapping)) or not isinstance(fanouts, Sequence) or not fanouts:
            raise ConfigError(
                f"fanouts is {fanouts!r}; expected a list with a number for each layer, such as [15, 10]."
            )
        for layer, fanout in enumerate(fanouts):
            for value in fanout.values() if isinstance(fanout, Mapping) else [fanout]:
                if not isinstance(value, int) or isinstance(value, bool) or value < -1:
                    raise ConfigError(
                        f"fanouts[{layer}] has {value!r}; expected an integer of at least 0, or -1 for all."
                    )
        super().__init__(copy_edata, input_node_features, output_node_features, output_device, feature_cache_bytes)
        self.fanouts = list(fanouts)
        self.prob = prob
        self.replace = bool(replace)

    def _plan(self, graph: GraphShardManager) -> tuple[WorkerGraph, Fanouts]:
        method = Fanouts([self._by_relation(graph, layer) for layer in range(len(self.fanouts))], self.replace)
        return self._worker_graph(graph, f"sampling of {self.fanouts}, replace {self.replace}", self.prob), method

    def _by_relation(self, graph: GraphShardManager, layer: int) -> list[int]:
        """The fan-out of every edge type, in the graph's order; `ALL` for -1."""
        fanout, etypes = self.fanouts[layer], graph.canonical_etypes
        if isinstance(fanout, Mapping):
            given = {graph.to_canonical_etype(etype): value for etype, value in fanout.items()}
            missing = [etype for etype in etypes if etype not in given]
            if missing:
                raise ConfigError(f"fanouts[{layer}] lacks the edge types {missing}; give each a number, such as 0.")
        else:
            given = dict.fromkeys(etypes, fanout)
        return [ALL if given[etype] == -1 else given[etype] for etype in etypes]
