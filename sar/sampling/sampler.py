"""The neighbor sampler of the whole graph."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sar.adapters.dgl.graphs import make_block, make_local_graph
from sar.comm import session
from sar.common_tuples import CanonicalEtype
from sar.core.graph.edges import InEdges, in_edges
from sar.core.graph.graph import GraphShardManager
from sar.core.graph.mfg import Seeds
from sar.errors import ConfigError
from sar.sampling.batch import Batch, SamplingSource, draw_batch
from sar.sampling.draws import ALL, random_key
from sar.sampling.seeds import check_seeds, global_ids
from sar.sampling.worker_graph import WorkerGraph, make_worker_graph

Fanout = int | Mapping[str | CanonicalEtype, int]
LabelShifts = Mapping[CanonicalEtype, int]  # numbers added to labels of seed edges: see `EdgePredictionSampler`


class DistNeighborSampler:
    """Samples in-neighbors of the seeds, then in-neighbors of these, into one block per layer.

    Each layer draws `fanout` in-edges of each node and edge type, or all if there are fewer, like
    `dgl.dataloading.NeighborSampler` on one machine (Hamilton et al. 2017, "Inductive Representation Learning on Large
    Graphs"). Nodes may be on any worker.

    Blocks are ordinary local `DGLBlock`s. `dgl.NID` holds global node IDs, as in `node_ranges`; `dgl.EID` holds the
    graph's edge IDs, as in its `edata`. Sources begin with the destinations, and seeds keep their order.

    All workers may change the attributes, which have the names of the arguments, between batches. In a loader with
    `num_workers`, changes take effect in the next epoch.

    Args:
        fanouts: number of in-edges to draw per node for each layer, input layer first; -1 for all. An entry may be a
            dictionary with the number for every edge type.
        prob: edge feature with sampling weights, (E,) or (E, 1), from 0 to 1e200, not necessarily normalised. Edges of
            weight 0 are never drawn. Edge types without this feature are sampled uniformly. Default: uniform.
        replace: draw with replacement, always `fanout` edges for a node with in-edges. Default False.
        copy_edata: copy the graph's edge features to the blocks. If False, blocks only have `dgl.EID`. Default True.
        input_node_features: features of this worker's nodes by name, (N_i, ...), to set on the sources of the first
            block. With several node types by `type/name`, (N_type, ...), as in `PartitionData.node_features`.
        output_node_features: features to set on the destinations of the last block, such as labels.
        output_device: device of the blocks. Default: the CPU. On GPUs, blocks are graphs of sar, which the same layers
            accept, because most builds of DGL support the CPU only.

    Raises:
        ConfigError: for invalid arguments.
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
    ) -> None:
        self.fanouts = fanouts
        self.prob = prob
        self.replace = replace
        self.copy_edata = copy_edata
        self.input_node_features = {} if input_node_features is None else input_node_features
        self.output_node_features = {} if output_node_features is None else output_node_features
        self.output_device = output_device
        self._check()
        self.fanouts = list(fanouts)
        self.input_node_features = dict(self.input_node_features)
        self.output_node_features = dict(self.output_node_features)
        self._edges: tuple[Any, Any, list[InEdges]] = None, None, []  # of a structure and edge types
        # The source of batches, identities and versions of the tensors it was made of, and these tensors, so that no
        # others get their identities.
        self._prepared: tuple[SamplingSource, Any, Any] | None = None

    def _check(self) -> None:
        """Check the settings, which may be changed between batches."""
        for name in ("input_node_features", "output_node_features"):
            features = getattr(self, name)
            if not isinstance(features, Mapping):
                raise ConfigError(f"{name} is a {type(features).__name__}; expected a dictionary from name to tensor.")
            for key, rows in features.items():
                if not isinstance(rows, Tensor):
                    raise ConfigError(f"{name}[{key!r}] is a {type(rows).__name__}; expected a tensor.")
        fanouts = self.fanouts
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

    def sample(self, full_graph_manager: GraphShardManager, seeds: Seeds) -> Any:
        """Sample one batch. All workers must call this together.

        Draws depend on torch's random state.

        Args:
            full_graph_manager: the graph, from `construct_full_graph`, in any mode.
            seeds: nodes of this worker: global IDs, (S,) integer, or row numbers by type as in `construct_mfgs`; may be
                empty.

        Returns:
            One `DGLBlock` per layer, input layer first. See `output_device`.

        Raises:
            GraphError: for seeds that do not exist, repeat or belong to another partition, or for a message flow graph.
            FieldError: for missing or unsuitable features.
            ConfigError: for fan-outs of unknown edge types.
            CommunicationError: another worker raised, or made a different call.
        """
        return self.to_graphs(sample_batch(self, full_graph_manager, seeds))

    def find_seeds(
        self, graph: GraphShardManager, local: WorkerGraph, seeds: Any, *, foreign: bool
    ) -> tuple[Tensor, LabelShifts]:
        """Convert the user's seeds for `draw_batch`; for seed edges, also return the shifts of their labels.

        `local` belongs to the source of batches, and `foreign` allows seeds of other workers. Called by all workers
        together, inside `group.guard()`.
        """
        return check_seeds(global_ids(graph, seeds), graph.node_ranges, foreign=foreign), {}

    def prepare(self, graph: GraphShardManager, call: str = "comparing features") -> SamplingSource:
        """Return the source of batches. All workers rebuild it if features or settings have changed on any of them.

        The workers agree on `call`. A tensor's version reveals changes in place, except those by numpy, by `.data` and
        in inference mode.
        """
        with session.current_group().guard() as group:
            self._check()
            settings = {k: v for k, v in vars(self).items() if not k.startswith("_") and "features" not in k}
            edge_frames = [graph.edges[etype].data for etype in graph.canonical_etypes]
            frames = [*edge_frames, self.input_node_features, self.output_node_features]
            named = {(i, name): feature for i, frame in enumerate(frames) for name, feature in frame.items()}
            states = [(place, id(x), None if x.is_inference() else x._version) for place, x in named.items()]
            made_of = id(graph._structure), graph.ntypes, graph.canonical_etypes, states, repr(settings)
            changed = any(group.agree(call, self._prepared is None or self._prepared[1] != made_of))
            if changed or self._prepared is None:
                fanouts, alive = self.fanouts_by_type(graph), (graph._structure, list(named.values()))
                what = f"sampling of {self.fanouts}, replace {self.replace}, prob {self.prob}"
                features = self.input_node_features, self.output_node_features
                local = make_worker_graph(graph, self.in_edges(graph), what, self.prob, self.copy_edata, *features)
                self._prepared = SamplingSource(local, fanouts, bool(self.replace)), made_of, alive
            return self._prepared[0]

    def to_graphs(self, batch: Batch) -> Any:
        """Convert a batch to a list of blocks on the output device: DGL's on the CPU, sar's elsewhere."""
        device, blocks = torch.device(self.output_device or "cpu"), []
        for layer in batch.layers:
            edges = {found.etype: (found.indptr, found.src, found.features) for found in layer.edges}
            made_of = layer.nodes, layer.num_dst, edges
            blocks.append(make_block(*made_of) if device.type == "cpu" else make_local_graph(*made_of, device))
        for ntype, features in batch.inputs.items():
            blocks[0].srcnodes[ntype].data.update({name: rows.to(device) for name, rows in features.items()})
        for ntype, features in batch.outputs.items():
            blocks[-1].dstnodes[ntype].data.update({name: rows.to(device) for name, rows in features.items()})
        return blocks

    def to_data(self, batch: Batch, shifts: LabelShifts) -> Any:
        """Convert a batch to PyTorch Geometric's `Data` or `HeteroData` on the output device."""
        from sar.adapters.pyg.graph import LayerEdges, make_batch

        layers = batch.layers
        edges = [
            {found.etype: LayerEdges(found.src, found.dst, found.features) for found in layer.edges} for layer in layers
        ]
        num_dst = [layer.num_dst for layer in layers]
        data = make_batch(layers[0].nodes, num_dst, edges, batch.inputs, batch.outputs)
        return data if self.output_device is None else data.to(self.output_device)

    def in_edges(self, graph: GraphShardManager) -> list[InEdges]:
        """Return the graph's in-edges, cached until another graph or other edge types are requested."""
        structure, etypes, edges = self._edges
        if structure is not graph._structure or etypes != graph.canonical_etypes:
            edges = in_edges(graph)
            self._edges = graph._structure, graph.canonical_etypes, edges
        return edges

    def fanouts_by_type(self, graph: GraphShardManager) -> list[list[int]]:
        """Return the fan-outs of every layer, by edge type in the graph's order; `ALL` stands for -1."""
        fanouts = []
        for layer, fanout in enumerate(self.fanouts):
            given = by_etype(graph, fanout)
            missing = [etype for etype in graph.canonical_etypes if etype not in given]
            if missing:
                raise ConfigError(f"fanouts[{layer}] lacks the edge types {missing}; give each a number, such as 0.")
            fanouts.append([ALL if given[etype] == -1 else given[etype] for etype in graph.canonical_etypes])
        return fanouts


def sample_batch(sampler: Any, graph: GraphShardManager, seeds: Any) -> Batch:
    """Sample one batch of this worker's seeds, for `sample` of both samplers."""
    with session.current_group().guard() as group:
        source = sampler.prepare(graph)
        found, _ = sampler.find_seeds(graph, source.graph, seeds, foreign=False)
        group.agree(f"{source.graph.signature}: a batch")
        return draw_batch(group, source, found, random_key())


def by_etype(graph: GraphShardManager, given: Any) -> dict[CanonicalEtype, Any]:
    """Expand values to a dictionary by canonical edge type; a value that is no dictionary applies to all edge types."""
    if not isinstance(given, Mapping):
        return dict.fromkeys(graph.canonical_etypes, given)
    return {graph.to_canonical_etype(etype): value for etype, value in given.items()}
