"""The sampler that users make: it checks what they ask for, and turns sampled batches into blocks of DGL."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sar.adapters.dgl.blocks import attach_features, make_block
from sar.comm import session
from sar.common_tuples import CanonicalEtype
from sar.core.graph.graph import GraphShardManager
from sar.core.graph.in_edges import InEdges, in_edges
from sar.core.graph.mfg import Seeds
from sar.errors import ConfigError
from sar.kernels.neighbor_sampling import ALL
from sar.sampling.batch import Batch, SamplingSource, random_key, sample_batch
from sar.sampling.batch_features import fill_cache
from sar.sampling.seeds import check_seeds, global_ids
from sar.sampling.worker_graph import BatchFields, make_worker_graph

Fanout = int | Mapping[str | CanonicalEtype, int]


class _Prepared(NamedTuple):
    """What batches are sampled from, and what it was made of."""

    made_of: Any  # identities and versions
    alive: Any  # the objects, so that no others get their identities
    source: SamplingSource


class DistNeighborSampler:
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
        for name, features in (("input", input_node_features), ("output", output_node_features)):
            if features is not None and not isinstance(features, Mapping):
                raise ConfigError(
                    f"{name}_node_features is a {type(features).__name__}; expected a dictionary from name to tensor."
                )
            for key, rows in (features or {}).items():
                if not isinstance(rows, Tensor):
                    raise ConfigError(f"{name}_node_features[{key!r}] is a {type(rows).__name__}; expected a tensor.")
        if feature_cache_bytes < 0:
            raise ConfigError(f"feature_cache_bytes is {feature_cache_bytes}; expected at least 0.")
        self.fanouts = list(fanouts)
        self.prob = prob
        self.replace = bool(replace)
        self.copy_edata = copy_edata
        self.input_node_features = dict(input_node_features or {})
        self.output_node_features = dict(output_node_features or {})
        self.output_device = output_device
        self.feature_cache_bytes = feature_cache_bytes
        self._hits = self._misses = 0
        self._edges: tuple[GraphShardManager, list[InEdges]] | None = None
        self._prepared: _Prepared | None = None

    @property
    def feature_cache_hit_rate(self) -> float:
        """Of the remote input nodes of all batches so far, the fraction that was in the cache; 0 at first."""
        return self._hits / max(self._hits + self._misses, 1)

    def sample(self, full_graph_manager: GraphShardManager, seeds: Seeds) -> list[Any]:
        """Sample one batch; called by all workers together.

        Draws depend on torch's random state.

        Args:
            full_graph_manager: the graph, from `construct_full_graph`, in any mode.
            seeds: this worker's nodes: global IDs, (S,) integer, or rows by type as `construct_mfgs` takes them; may be
                empty.

        Returns:
            One `DGLBlock` a layer, input layer first.

        Raises:
            GraphError: for seeds that do not exist, are given twice, or are of another partition; for a message flow
                graph.
            FieldError: for fields that are not there, or not fit.
            ConfigError: for fan-outs of unknown edge types.
            CommunicationError: where another worker raised, or asks for something else.
        """
        group = session.current_group()
        with group.guard():
            source = self.prepare(full_graph_manager)
            nodes = check_seeds(global_ids(full_graph_manager, seeds), group, source.graph.node_ranges)
        return self.to_blocks(sample_batch(group, source, nodes, random_key()))

    def prepare(self, graph: GraphShardManager) -> SamplingSource:
        """What batches are sampled from; made by all workers together, anew where fields of the graph have changed."""
        group = session.current_group()
        with group.guard():
            fields = [column for etype in graph.canonical_etypes for column in graph.edges[etype].data.values()]
            fields += [*self.input_node_features.values(), *self.output_node_features.values()]
            made_of = (
                id(graph._structure),
                graph.canonical_etypes,
                [(id(field), _state_of(field)) for field in fields],
            )
            if self._prepared is None or self._prepared.made_of != made_of:
                self._prepared = _Prepared(made_of, (graph._structure, fields), self._make_source(graph))
            return self._prepared.source

    def to_blocks(self, batch: Batch) -> list[Any]:
        """A sampled batch as blocks of DGL, on the output device."""
        blocks = []
        for layer in batch.layers:
            edges = {found.etype: (found.indptr, found.src, found.features) for found in layer.edges}
            blocks.append(make_block(layer.nodes, layer.num_dst, edges))
        attach_features(blocks, batch.features.inputs, batch.features.outputs)
        self._hits += batch.features.hits
        self._misses += batch.features.misses
        return blocks if self.output_device is None else [block.to(self.output_device) for block in blocks]

    def _make_source(self, graph: GraphShardManager) -> SamplingSource:
        fanouts = [self._by_relation(graph, layer) for layer in range(len(self.fanouts))]
        settings = (
            f"sampling of {self.fanouts}, prob {self.prob}, replace {self.replace}, "
            f"feature cache {self.feature_cache_bytes > 0}"
        )
        fields = BatchFields(self.prob, self.copy_edata, self.input_node_features, self.output_node_features)
        local = make_worker_graph(graph, self.in_edges(graph), fields, settings)
        cache = None
        if self.feature_cache_bytes:
            cache = fill_cache(session.current_group(), local, self.feature_cache_bytes)
        return SamplingSource(local, fanouts, self.replace, cache)

    def in_edges(self, graph: GraphShardManager) -> list[InEdges]:
        """The graph's in-edges, which are kept as long as no others are asked for."""
        if self._edges is not None:
            known, edges = self._edges
            if known._structure is graph._structure and known.canonical_etypes == graph.canonical_etypes:
                return edges
        edges = in_edges(graph)
        self._edges = (graph, edges)
        return edges

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


def _state_of(field: Tensor) -> int:
    """Another number where a tensor was changed in place."""
    if field.is_inference():  # these have no versions
        return zlib.crc32(field.cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    return field._version
