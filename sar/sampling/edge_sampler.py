"""The sampler of seed edges: around a neighbor sampler, as in DGL, with negative pairs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sar.adapters.dgl.graphs import make_pair_graph
from sar.comm import session
from sar.comm.group import Group
from sar.comm.rows import FieldFormat
from sar.common_tuples import EID, NID, CanonicalEtype
from sar.core.graph.graph import GraphShardManager
from sar.errors import ConfigError, GraphError
from sar.sampling.batch import Batch, Pairs, PairsOfType, SamplingSource
from sar.sampling.draws import Numbering, derive_key
from sar.sampling.neighbors import SampledLayer, sample_layers
from sar.sampling.owner_requests import NodesByOwner, Rows, send_requests
from sar.sampling.sampler import DistNeighborSampler, LabelShifts, by_etype, sample_batch
from sar.sampling.seeds import SeedColumn, SeedEdges, edge_ids, look_up_edges, reverse_edges
from sar.sampling.worker_graph import WorkerGraph

Etype = str | CanonicalEtype
LABEL = "edge_label"  # the edge feature that PyTorch Geometric calls the labels of seed edges
PAIRS = 2**32  # the number of the pairs' key among those of a batch; layers have those from 0 on


def draw_pairs(
    group: Group, graph: WorkerGraph, seeds: Tensor, key: int, negatives: Sequence[float] | None, both_ends: bool
) -> Pairs:
    """The seeds and negative pairs, as positions among the nodes that they join.

    The negative pairs (u, v') of a seed (u, v) have any v' of v's type, equally likely.

    Args:
        group: the workers, which have agreed on the batch, inside `group.guard()`.
        graph: this worker's part of the graph.
        seeds: rows, see [Note: seed edges].
        key: 63 bits that belong to this worker and batch.
        negatives: for every edge type, pairs to draw for a seed; None for no second graph.
        both_ends: negative pairs (u', v') have any two nodes of the types. There are `negatives` for a seed on average,
            rounded up in a batch.
    """
    generator = torch.Generator().manual_seed(key)
    by_type = [seeds[seeds[:, SeedColumn.TYPE] == number] for number in range(len(graph.relations))]
    pairs = []
    for relation, of_type, features in zip(
        graph.relations, by_type, _edge_features(group, graph, by_type), strict=True
    ):
        src, dst = of_type[:, SeedColumn.SRC].contiguous(), of_type[:, SeedColumn.DST].contiguous()
        pairs.append(PairsOfType(relation.etype, src, dst, features))
    num_types = len(pairs)
    for (etype, src, dst, _), count in zip(pairs[:num_types], negatives or [], strict=False):
        total = math.ceil(len(src) * count)
        dst = _any_nodes(graph, etype[2], total, generator)
        src = _any_nodes(graph, etype[0], total, generator) if both_ends else src.repeat_interleave(int(count))
        pairs.append(PairsOfType(etype, src, dst, {}))
    numbering = {}
    for ntype in graph.node_types:
        most = sum(len(of_type.src) for of_type in pairs for end in (0, 2) if of_type.etype[end] == ntype)
        numbering[ntype] = Numbering(most, graph.num_nodes)
    for number, (etype, src, dst, _) in enumerate(pairs):
        pairs[number] = pairs[number]._replace(src=numbering[etype[0]].add(src), dst=numbering[etype[2]].add(dst))
    nodes = {ntype: numbers.nodes for ntype, numbers in numbering.items()}
    negative = pairs[num_types:] if negatives is not None else None
    numbers = [of_type[:, SeedColumn.NUMBER].contiguous() for of_type in by_type]
    return Pairs(nodes, pairs[:num_types], negative, numbers)


class EdgePredictionSampler:
    """Samples the neighbourhoods of the nodes that seed edges join: for link prediction, and for values of edges.

    The counterpart of `dgl.dataloading.as_edge_prediction_sampler`. A batch is `(input_nodes, pair_graph,
    blocks)`, or `(input_nodes, pair_graph, neg_graph, blocks)` with negative pairs:

    - `input_nodes`: global IDs of the sources of `blocks[0]`; with several node types by type.
    - `pair_graph`: a `DGLGraph`, or on a GPU a graph of sar's, with the seeds as edges, in their order, with `dgl.EID`
      and, unless the inner sampler has `copy_edata=False`, the graph's edge features.
    - `neg_graph`: for each seed (u, v) its pairs (u, v'), with any v' of v's type, equally likely.
    - `blocks`: those of the inner sampler. The destinations of the last are the nodes of both graphs, in their order.

    With `format="pyg"` a batch is a `Data` or `HeteroData` as `torch_geometric.loader.LinkNeighborLoader` makes it,
    with `input_id` (positions among the worker's seeds of the type) and `edge_label_index`, in which negative pairs
    come last. Edge feature `edge_label` gives `edge_label` of the seeds; with negative pairs 0 is theirs, and other
    labels count from 1, or are 1 if there is no such feature. In mode "triplet" `src_index`, `dst_pos_index` and
    `dst_neg_index` take the place of these. The nodes that pairs join come first.

    Args:
        sampler: draws the neighbours.
        exclude: edges to leave out of the blocks, after the draws, as DGL does: "self", the seeds of the batch;
            "reverse_id", also their reverse edges by `reverse_eids`; "reverse_types", also the edges back by
            `reverse_etypes`, as `reverse_edges` finds them; None, the default, for none.
        reverse_eids: `dgl.EID` of the reverse of each of this worker's edges, (E_i,) int64 in the order of `edata`, -1
            for none; with several edge types by type. `sar.reverse_edges` finds them.
        reverse_etypes: from edge type to the type of its reverse edges.
        negative_sampler: pairs to draw for each seed, or a dictionary with the number for edge types; or
            `dgl.dataloading.negative_sampler.Uniform`; or `torch_geometric.sampler.NegativeSampling` without weights,
            of which "binary" draws both ends of `amount` pairs for each seed on average. Default: no negative pairs.

    Raises:
        ConfigError: for arguments of another form.
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
        """Sample one batch; called by all workers together. A loader looks edges up once, and this each time.

        Args:
            full_graph_manager: the graph, from `construct_full_graph`, in any mode.
            edges: edges into this worker's nodes, as `DataLoader` takes them; may be empty.

        Raises:
            GraphError, FieldError, ConfigError, CommunicationError: as `DistNeighborSampler.sample`.
        """
        return self.to_graphs(sample_batch(self, full_graph_manager, edges))

    def prepare(self, graph: GraphShardManager, call: str = "comparing features") -> SamplingSource:
        """The source of batches, that of the inner sampler with draws of pairs."""
        with session.current_group().guard():
            source = self.sampler.prepare(graph, call)
            if self._source is None or self._source[0] is not source:
                fanouts, replace_drawn = self.sampler.fanouts_by_type(graph), bool(self.sampler.replace)
                excludes, both_ends = self.exclude is not None, self.mode == "binary"
                given = None if self.negatives is None else by_etype(graph, self.negatives)
                negatives = None if given is None else [given.get(etype, 0) for etype in graph.canonical_etypes]

                def draw(group: Group, local: WorkerGraph, seeds: Tensor, key: int) -> tuple[list[SampledLayer], Pairs]:
                    pairs = draw_pairs(group, local, seeds, derive_key(key, PAIRS), negatives, both_ends)
                    exclude = seeds[:, [SeedColumn.ID, SeedColumn.REVERSE]].flatten() if excludes else None
                    return sample_layers(group, local, pairs.nodes, key, fanouts, replace_drawn, exclude), pairs

                settings = f"seed edges, excluded {excludes}, negative pairs {negatives}, both ends {both_ends}"
                local = replace(source.graph, signature=f"{source.graph.signature}, {settings}")
                self._source = source, replace(source, graph=local, draw=draw)
            return self._source[1]

    def find_seeds(
        self, graph: GraphShardManager, local: WorkerGraph, seeds: SeedEdges, *, foreign: bool
    ) -> tuple[Tensor, LabelShifts]:
        """The edges as rows, see [Note: seed edges], and the shifts of their labels; else as of `DistNeighborSampler`.

        A shift is added to labels of a type in batches of PyTorch Geometric, so that 0 is left for negative
        pairs. The types are those of which any worker has seeds.
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
                # Labels of the graph's edges count, as those of classes.
                seen[number, 1] = self.mode != "triplet" and labels is not None and bool((labels == 0).any())
            seen = torch.stack(group.all_gather(seen, "types and labels of seed edges")).amax(0)
            seen[:, 1] *= self.negatives is not None
            by_type = zip(graph.canonical_etypes, seen.tolist(), strict=True)
            shifts = {etype: shift for etype, (there, shift) in by_type if there}
            if self.mode == "triplet" and len(shifts) > 1:
                raise GraphError(f"Seeds are of the types {list(shifts)}; expected one type for triplets.")
            return rows, shifts

    def to_graphs(self, batch: Batch) -> tuple[Any, ...]:
        """A sampled batch as graphs, on the output device."""
        pairs, blocks = batch.pairs, self.sampler.to_graphs(batch)
        device = torch.device(self.sampler.output_device or "cpu")
        assert pairs is not None
        kinds = [pairs.positive] if pairs.negative is None else [pairs.positive, pairs.negative]
        edges = [{etype: (src, dst, features) for etype, src, dst, features in of_types} for of_types in kinds]
        graphs = [make_pair_graph(pairs.nodes, of_types, device) for of_types in edges]
        return blocks[0].srcdata[NID], *graphs, blocks

    def to_data(self, batch: Batch, shifts: LabelShifts) -> Any:
        """A sampled batch as a `Data` or `HeteroData` of PyTorch Geometric, on the output device."""
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


def _any_nodes(graph: WorkerGraph, ntype: str, count: int, generator: torch.Generator) -> Tensor:
    """Global IDs of nodes of a type, all equally likely, (count,) int64."""
    mine = graph.runs.types == graph.node_types.index(ntype)
    ends = torch.cat([graph.runs.starts[1:], torch.tensor([graph.num_nodes], device="cpu")])
    reached = (ends - graph.runs.starts)[mine].cumsum(0)
    drawn = torch.randint(int(reached[-1]) if count else 1, (count,), generator=generator, device="cpu")
    return drawn + (ends[mine] - reached)[torch.searchsorted(reached, drawn, right=True)]


def _edge_features(group: Group, graph: WorkerGraph, by_type: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """The seeds' IDs and features, which their owners have; for every edge type (S, ...) each."""
    features = [{EID: of_type[:, SeedColumn.ID].contiguous()} for of_type in by_type]
    formats = [FieldFormat.of(feature) for relation in graph.relations for feature in relation.features.values()]
    if not formats:
        return features
    asked = [NodesByOwner.sort(of_type[:, SeedColumn.DST].contiguous(), graph.node_ranges) for of_type in by_type]
    requests = [
        [of_type[nodes.positions[p], SeedColumn.PLACE] for of_type, nodes in zip(by_type, asked, strict=True)]
        for p in range(group.world_size)
    ]

    def respond(places: list[Tensor]) -> list[Rows]:
        columns = []
        for relation, of_type in zip(graph.relations, places, strict=True):
            if relation.features:
                rows = relation.rows[of_type]
                columns += [Rows(feature, rows) for feature in relation.features.values()]
        return columns

    by_owner = send_requests(group, f"{graph.signature}: seed edges", requests, respond, formats)()
    columns = map(torch.cat, zip(*by_owner, strict=True))
    for relation, nodes, of_type in zip(graph.relations, asked, features, strict=True):
        of_type |= {name: nodes.restore(next(columns)) for name in relation.features}
    return features
