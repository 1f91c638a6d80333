"""The sampler of seed edges: around a neighbor sampler, as in DGL, with negative pairs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sar.adapters.dgl.graphs import make_pair_graph
from sar.comm import session
from sar.common_tuples import NID, CanonicalEtype
from sar.core.graph.graph import GraphShardManager
from sar.errors import ConfigError, GraphError
from sar.sampling.batch import Batch, PairSettings, SamplingSource
from sar.sampling.sampler import DistNeighborSampler, LabelShifts, by_etype, sample_batch
from sar.sampling.seed_edges import SeedColumn, SeedEdges, edge_ids, look_up_edges, reverse_edges
from sar.sampling.worker_graph import WorkerGraph

Etype = str | CanonicalEtype
LABEL = "edge_label"  # the edge feature that PyTorch Geometric calls the labels of seed edges


class EdgePredictionSampler:
    """Samples the neighbourhoods of the end nodes of seed edges, for link prediction and edge labels.

    The counterpart of `dgl.dataloading.as_edge_prediction_sampler`. A batch is `(input_nodes, pair_graph, blocks)`, or
    `(input_nodes, pair_graph, neg_graph, blocks)` with negative pairs:

    - `input_nodes`: global IDs of the sources of `blocks[0]`; a dictionary by type with several node types.
    - `pair_graph`: a `DGLGraph`, or on GPUs a graph of sar, whose edges are the seeds in order. It has `dgl.EID` and,
      unless the inner sampler has `copy_edata=False`, the graph's edge features.
    - `neg_graph`: for each seed (u, v) its negative pairs (u, v'), with v' drawn uniformly from the nodes of v's type.
    - `blocks`: the inner sampler's blocks. The last block's destinations are the nodes of both graphs, in order.

    With `format="pyg"` a batch is a `Data` or `HeteroData` as from `torch_geometric.loader.LinkNeighborLoader`, with
    `input_id` (positions among the worker's seeds of the type) and `edge_label_index`, in which negative pairs come
    last. `edge_label` holds the seeds' edge feature of that name; with negative pairs, their label is 0, and seed
    labels are shifted to begin at 1, or are 1 without that feature. In mode "triplet", `src_index`, `dst_pos_index`
    and `dst_neg_index` replace both. The end nodes of pairs come first.

    Args:
        sampler: the neighbor sampler.
        exclude: edges to remove from the blocks after sampling, as in DGL: "self", the batch's seeds; "reverse_id",
            also their reverse edges, from `reverse_eids`; "reverse_types", also their reverse edges, found by
            `reverse_edges` from `reverse_etypes`. Default None removes nothing.
        reverse_eids: `dgl.EID` of the reverse of each of this worker's edges, (E_i,) int64 in the order of `edata`, -1
            for none; a dictionary by type with several edge types. `sar.reverse_edges` computes it.
        reverse_etypes: a dictionary from edge type to the type of its reverse edges.
        negative_sampler: number of negative pairs per seed, or a dictionary by edge type; or
            `dgl.dataloading.negative_sampler.Uniform`; or `torch_geometric.sampler.NegativeSampling` without weights,
            whose mode "binary" draws both end nodes, of `amount` pairs per seed on average. Default: no negative pairs.

    Raises:
        ConfigError: for invalid arguments.
    """

    def __init__(
        self,
        sampler: DistNeighborSampler,
        exclude: str | None = None,
        reverse_eids: Tensor | Mapping[Etype, Tensor] | None = None,
        reverse_etypes: Mapping[Etype, Etype] | None = None,
        negative_sampler: Any = None,
    ) -> None:
        if not isinstance(sampler, DistNeighborSampler):
            raise ConfigError(f"{type(sampler).__name__} has no seed nodes; expected a sampler of blocks.")
        needed = {"reverse_id": reverse_eids, "reverse_types": reverse_etypes}
        if exclude not in (None, "self", *needed):
            raise ConfigError(f"exclude is {exclude!r}; expected None, 'self', 'reverse_id' or 'reverse_types'.")
        if exclude in needed and needed[exclude] is None:
            raise ConfigError(
                f"exclude={exclude!r} needs {'reverse_eids' if exclude == 'reverse_id' else 'reverse_etypes'}."
            )
        if type(negative_sampler).__name__ == "PerSourceUniform":  # DGL's Uniform
            negative_sampler = negative_sampler.k
        self.mode = ""
        if type(negative_sampler).__name__ == "NegativeSampling":  # PyTorch Geometric's
            if negative_sampler.src_weight is not None or negative_sampler.dst_weight is not None:
                raise ConfigError("NegativeSampling has weights of nodes; expected none: all are equally likely.")
            self.mode, negative_sampler = negative_sampler.mode.value, negative_sampler.amount
        counts = negative_sampler.values() if isinstance(negative_sampler, Mapping) else [negative_sampler]
        whole = int | float if self.mode == "binary" else int
        if negative_sampler is not None and not all(
            isinstance(count, whole) and not isinstance(count, bool) and count >= 0 for count in counts
        ):
            raise ConfigError(
                f"negative_sampler is {negative_sampler!r}; expected the number of pairs for each seed, a dictionary "
                "with this number for edge types, dgl.dataloading.negative_sampler.Uniform, or NegativeSampling of "
                "torch_geometric.sampler."
            )
        self.sampler = sampler
        self.exclude = exclude
        self.reverse_eids = reverse_eids
        self.reverse_etypes = dict(reverse_etypes or {})
        self.negatives = negative_sampler
        self._source: tuple[SamplingSource, SamplingSource] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and "_source" in vars(self):  # made, and loaders have looked up edges for it
            raise ConfigError(f"{name} of an EdgePredictionSampler cannot be changed; make another, and its loader.")
        super().__setattr__(name, value)

    def sample(self, full_graph_manager: GraphShardManager, edges: SeedEdges) -> tuple[Any, ...]:
        """Sample one batch. All workers must call this together. A `DataLoader` is faster: it looks edges up once.

        Args:
            full_graph_manager: the graph, from `construct_full_graph`, in any mode.
            edges: edges into this worker's nodes, as for `DataLoader`; may be empty.

        Raises:
            GraphError, FieldError, ConfigError, CommunicationError: as in `DistNeighborSampler.sample`.
        """
        return self.to_graphs(sample_batch(self, full_graph_manager, edges))

    def prepare(self, graph: GraphShardManager, call: str = "comparing features") -> SamplingSource:
        """Return the inner sampler's source of batches, with the settings of pairs."""
        with session.current_group().guard():
            source = self.sampler.prepare(graph, call)
            if self._source is None or self._source[0] is not source:
                given = None if self.negatives is None else by_etype(graph, self.negatives)
                negatives = None if given is None else [given.get(etype, 0) for etype in graph.canonical_etypes]
                pairs = PairSettings(negatives, both_ends=self.mode == "binary", excludes=self.exclude is not None)
                local = replace(source.graph, signature=f"{source.graph.signature}, seed edges, {pairs}")
                self._source = source, replace(source, graph=local, pairs=pairs)
            return self._source[1]

    def find_seeds(
        self, graph: GraphShardManager, local: WorkerGraph, seeds: SeedEdges, *, foreign: bool
    ) -> tuple[Tensor, LabelShifts]:
        """Return seed edges as rows, see [Note: seed edges], and shifts of their labels.

        In batches of PyTorch Geometric, the shift is added to labels of a type to reserve 0 for negative pairs. The
        edge types are those of the seeds of all workers.
        """
        with session.current_group().guard() as group:
            backs = {graph.to_canonical_etype(t): graph.to_canonical_etype(b) for t, b in self.reverse_etypes.items()}
            group.agree(f"seed edges, exclude {self.exclude}, reverse types {backs}, foreign {foreign}")
            reverse: list[Tensor | None] = [None] * len(local.relations)
            for number, found in enumerate(self.sampler.in_edges(graph)):
                if self.exclude == "reverse_id":
                    reverse[number] = self._reverse_ids(graph, found.etype)[found.edges]
                elif self.exclude == "reverse_types" and found.etype in backs:
                    reverse[number] = reverse_edges(graph, found.etype, backs[found.etype])[found.edges]
            rows = look_up_edges(graph, local, edge_ids(graph, seeds), reverse, foreign=foreign)
            seen = torch.zeros(len(graph.canonical_etypes), 2, dtype=torch.int64, device="cpu")
            for number, etype in enumerate(graph.canonical_etypes):
                of_type, labels = rows[:, SeedColumn.TYPE] == number, graph.edges[etype].data.get(LABEL)
                alone = int((of_type & (rows[:, SeedColumn.REVERSE] < 0)).sum())
                if self.exclude == "reverse_types" and etype in backs and alone:
                    raise GraphError(
                        f"{alone} seeds of type {etype} have no edge back of type {backs[etype]}, their reverse type."
                    )
                seen[number, 0] = of_type.any()
                # We look at the labels of all edges of the graph, not only of seeds, because they are classes.
                seen[number, 1] = self.mode != "triplet" and labels is not None and bool((labels == 0).any())
            seen = torch.stack(group.all_gather(seen, "types and labels of seed edges")).amax(0)
            seen[:, 1] *= self.negatives is not None
            by_type = zip(graph.canonical_etypes, seen.tolist(), strict=True)
            shifts = {etype: shift for etype, (there, shift) in by_type if there}
            if self.mode == "triplet" and len(shifts) > 1:
                raise GraphError(f"Seeds are of the types {list(shifts)}; expected one type for triplets.")
            return rows, shifts

    def to_graphs(self, batch: Batch) -> tuple[Any, ...]:
        """Convert a batch to graphs on the output device."""
        pairs, blocks = batch.pairs, self.sampler.to_graphs(batch)
        device = torch.device(self.sampler.output_device or "cpu")
        assert pairs is not None
        kinds = [pairs.positive] if pairs.negative is None else [pairs.positive, pairs.negative]
        edges = [{etype: (src, dst, features) for etype, src, dst, features in of_types} for of_types in kinds]
        graphs = [make_pair_graph(pairs.nodes, of_types, device) for of_types in edges]
        return blocks[0].srcdata[NID], *graphs, blocks

    def to_data(self, batch: Batch, shifts: LabelShifts) -> Any:
        """Convert a batch to PyTorch Geometric's `Data` or `HeteroData` on the output device."""
        from sar.adapters.pyg.graph import SeedPairs, add_seed_pairs

        pairs, data, device = batch.pairs, self.sampler.to_data(batch, shifts), self.sampler.output_device
        assert pairs is not None
        found: dict[CanonicalEtype, SeedPairs] = {}
        for number, positive in enumerate(pairs.positive):
            negative = None if pairs.negative is None else (pairs.negative[number].src, pairs.negative[number].dst)
            if positive.etype in shifts:
                labels = positive.features.get(LABEL)
                labels = None if labels is None else labels + shifts[positive.etype]
                found[positive.etype] = SeedPairs(pairs.numbers[number], (positive.src, positive.dst), negative, labels)
        add_seed_pairs(data, found, triplets=self.negatives if self.mode == "triplet" else 0)
        return data if device is None else data.to(device)

    def _reverse_ids(self, graph: GraphShardManager, etype: CanonicalEtype) -> Tensor:
        """`reverse_eids` of an edge type, checked."""
        given, count = self.reverse_eids, graph.num_edges(etype)
        if isinstance(given, Mapping):
            given = by_etype(graph, given).get(etype)
        elif len(graph.canonical_etypes) > 1:
            raise ConfigError("The graph has several edge types; give reverse_eids as a dictionary by edge type.")
        if given is None:
            return torch.full((count,), -1, device="cpu")
        if given.dtype != torch.int64 or given.shape != (count,):
            raise ConfigError(
                f"reverse_eids of {etype} is {given.dtype} {tuple(given.shape)}; expected int64 ({count},), an ID for "
                "each of this worker's edges."
            )
        return given.cpu()
