"""A mini-batch in plain tensors, sampled by all workers together, before DGL or PyTorch Geometric gets it.

[Note: in step]
A node's in-edges are on its owner. So each layer takes two exchanges: nodes go to their owners, and drawn edges come
back. Workers without seeds take part, because they may own nodes of other workers' batches. The edges drawn for a node
depend on the key of the requesting worker, the layer and the node, not on the owner or on timing.

The workers agree once per batch, which determines the number and order of its exchanges. Messages carry their length.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sar.comm.group import Group
from sar.comm.rows import FieldFormat
from sar.common_tuples import EID, CanonicalEtype
from sar.sampling.draws import Numbering, copy_rows, derive_key, draw_in_edges
from sar.sampling.owner_requests import NodesByOwner, Rows, send_requests
from sar.sampling.seed_edges import SeedColumn
from sar.sampling.worker_graph import Features, WorkerGraph
from sar.tensors.ids import to_offsets

PAIRS = 2**32  # derives the key of the pairs from a batch's key; layers use the numbers from 0 on


class PairSettings(NamedTuple):
    """How seed edges become pairs of nodes."""

    negatives: Sequence[float] | None  # negative pairs per seed, by edge type; None for no second graph
    both_ends: bool  # whether both nodes of a negative pair are drawn; else it is (u, v') for a seed (u, v)
    excludes: bool  # whether the seeds and their reverse edges are left out of the blocks


@dataclass(frozen=True)
class SamplingSource:
    """The graph, features and settings to sample with."""

    graph: WorkerGraph
    fanouts: Sequence[Sequence[int]]  # edges to draw at a node by layer, input layer first, and edge type
    replace: bool  # draw with replacement
    pairs: PairSettings | None = None  # if seeds are edges


class SampledEdges(NamedTuple):
    """The sampled edges of one type, by destination."""

    etype: CanonicalEtype
    indptr: Tensor  # (N_dst + 1,) int64
    src: Tensor  # (E,) int64: positions among the sources
    features: dict[str, Tensor]  # (E, ...) each; `_ID` among them

    @property
    def dst(self) -> Tensor:
        """Positions among the destinations, (E,) int64."""
        return torch.repeat_interleave(self.indptr.diff())


class SampledLayer(NamedTuple):
    """The sampled edges of one layer, and the nodes that they join."""

    nodes: dict[str, Tensor]  # global IDs of the sources of every type, (N_src,) int64; the destinations come first
    num_dst: dict[str, int]
    edges: list[SampledEdges]


class PairsOfType(NamedTuple):
    """Pairs of one type, by positions among the nodes of a batch."""

    etype: CanonicalEtype
    src: Tensor  # (S,) int64
    dst: Tensor  # (S,) int64
    features: dict[str, Tensor]  # (S, ...) each


class Pairs(NamedTuple):
    """The end nodes of a batch's seed edges, and negative pairs."""

    nodes: dict[str, Tensor]  # global IDs of every type, (N,) int64, as they come up
    positive: list[PairsOfType]  # the seeds, with `_ID` and their features
    negative: list[PairsOfType] | None
    numbers: list[Tensor]  # by type, (S,) int64: `SeedColumn.NUMBER` of the seeds


class Batch(NamedTuple):
    """A sampled mini-batch."""

    layers: list[SampledLayer]  # input layer first
    pairs: Pairs | None  # if seeds are edges
    inputs: Features  # of the first layer's sources
    outputs: Features  # of the last layer's destinations


def draw_batch(group: Group, source: SamplingSource, seeds: Tensor, key: int) -> Batch:
    """Draw a batch and fetch its features. Called by all workers after agreement, inside `group.guard()`.

    Args:
        group: the workers.
        source: the graph, features and settings, equal on all workers.
        seeds: distinct global IDs, (S,) int64, or rows of seed edges, (S, 7), see [Note: seed edges]; may be empty.
        key: 63 bits, unique for this worker and batch.
    """
    graph, exclude, pairs, layers = source.graph, None, None, list[SampledLayer]()
    if source.pairs is None:
        nodes = graph.by_type(seeds)
    else:
        pairs = draw_pairs(group, graph, source.pairs, seeds, derive_key(key, PAIRS))
        nodes = pairs.nodes
        if source.pairs.excludes:
            exclude = seeds[:, [SeedColumn.ID, SeedColumn.REVERSE]].flatten()
    for number in reversed(range(len(source.fanouts))):
        layers.insert(0, sample_layer(group, source, nodes, number, derive_key(key, number), exclude))
        nodes = layers[0].nodes
    outputs = {ntype: of_type[: layers[-1].num_dst[ntype]] for ntype, of_type in layers[-1].nodes.items()}
    return Batch(layers, pairs, *fetch_features(group, graph, nodes, outputs))


def sample_layer(
    group: Group,
    source: SamplingSource,
    destinations: Mapping[str, Tensor],
    number: int,
    key: int,
    exclude: Tensor | None,
) -> SampledLayer:
    """Sample in-edges of nodes on any workers: see [Note: in step].

    Args:
        group: the workers.
        source: the graph and settings.
        destinations: distinct global IDs of every node type, (n,) int64 each.
        number: number of the layer.
        key: 63 bits, unique for this worker, batch and layer.
        exclude: IDs of edges to remove after the draws, as in DGL, (X,) int64.
    """
    graph, fanouts = source.graph, source.fanouts[number]
    relations = [k for k, fanout in enumerate(fanouts) if fanout]
    ntypes = sorted({graph.relations[k].etype[2] for k in relations})
    asked = {ntype: NodesByOwner.sort(destinations[ntype], graph.node_ranges) for ntype in ntypes}
    # A request consists of the sender's key and the nodes of each type.
    requests = [
        [torch.tensor([key], device="cpu"), *(asked[ntype].nodes[worker] for ntype in ntypes)]
        for worker in range(group.world_size)
    ]

    def draw(request: list[Tensor]) -> list[Tensor | Rows]:
        """Draw edges at this worker's nodes; the columns of `WorkerRelation.formats` of each type with a fan-out."""
        asker_key, *nodes = request
        by_type = dict(zip(ntypes, nodes, strict=True))
        columns: list[Tensor | Rows] = []
        for k in relations:
            relation, wanted = graph.relations[k], by_type[graph.relations[k].etype[2]]
            rows, relation_key = graph.rows(relation.etype[2], wanted), derive_key(int(asker_key), k)
            offsets, picked = draw_in_edges(
                rows, wanted, relation.indptr, relation.weights, fanouts[k], source.replace, relation_key
            )
            columns += [offsets.diff(), Rows(relation.src, picked), Rows(relation.ids, picked)]
            if relation.features:
                rows = relation.rows.index_select(0, picked)  # several times faster than indexing
                columns += [Rows(feature, rows) for feature in relation.features.values()]
        return columns

    formats = [field for k in relations for field in graph.relations[k].formats]
    by_owner = send_requests(group, f"{graph.signature}, layer {number}", requests, draw, formats)
    columns = (torch.cat(pieces) if len(pieces) > 1 else pieces[0] for pieces in zip(*by_owner, strict=True))
    edges = []
    for k, relation in enumerate(graph.relations):
        if k in relations:
            counts, *values = (next(columns) for _ in relation.formats)
            indptr, values = asked[relation.etype[2]].restore_segments(counts, values)
        else:
            indptr = torch.zeros(len(destinations[relation.etype[2]]) + 1, dtype=torch.int64, device="cpu")
            values = [column[:0].clone() for column in (relation.src, relation.ids, *relation.features.values())]
        if exclude is not None:
            kept = ~torch.isin(values[1], exclude)
            indptr, values = to_offsets(kept)[indptr], [column[kept] for column in values]
        features = dict(zip([EID, *relation.features], values[1:], strict=True))
        edges.append(SampledEdges(relation.etype, indptr, values[0], features))
    numbering = {}  # of the sources: destinations first, then new nodes in order of appearance
    for ntype, nodes in destinations.items():
        others = sum(len(sampled.src) for sampled in edges if sampled.etype[0] == ntype)
        numbering[ntype] = Numbering(len(nodes) + others, graph.num_nodes)
        numbering[ntype].add(nodes)
    edges = [sampled._replace(src=numbering[sampled.etype[0]].add(sampled.src)) for sampled in edges]
    num_dst = {ntype: len(nodes) for ntype, nodes in destinations.items()}
    return SampledLayer({ntype: numbers.nodes for ntype, numbers in numbering.items()}, num_dst, edges)


def fetch_features(
    group: Group, graph: WorkerGraph, input_nodes: Mapping[str, Tensor], output_nodes: Mapping[str, Tensor]
) -> tuple[Features, Features]:
    """Features of nodes, global IDs of every type, (n,) int64 each: the last two fields of `Batch`."""
    kinds = [*((ntype, input_nodes) for ntype in graph.inputs), *((ntype, output_nodes) for ntype in graph.outputs)]
    asked = [NodesByOwner.sort(nodes[ntype], graph.node_ranges) for ntype, nodes in kinds]
    tables = [*graph.inputs.values(), *graph.outputs.values()]
    wanted = [WantedRows(*of_kind) for of_kind in zip(tables, asked, (each.nodes for each in asked), strict=True)]
    found = fetch_rows(
        group, f"{graph.signature}: features", wanted, lambda kind, nodes: graph.rows(kinds[kind][0], nodes)
    )
    count = len(graph.inputs)
    inputs, outputs = zip(graph.inputs, found[:count], strict=True), zip(graph.outputs, found[count:], strict=True)
    return dict(inputs), dict(outputs)


class WantedRows(NamedTuple):
    """Rows to fetch from the owners of nodes."""

    tables: dict[str, Tensor]  # this worker's, (rows, ...) each
    asked: NodesByOwner
    numbers: Sequence[Tensor]  # by owner, the numbers to send to it, one per node, int64


def fetch_rows(
    group: Group, call: str, wanted: Sequence[WantedRows], rows_of: Callable[[int, Tensor], Tensor]
) -> list[dict[str, Tensor]]:
    """Fetch rows of tables in the order of the requested nodes, with one message to each owner and one back.

    On the owner, `rows_of(kind, numbers)` returns the rows of `wanted[kind]`. Own rows are copied.
    """
    formats = [FieldFormat.of(table) for kind in wanted for table in kind.tables.values()]
    if not formats:
        return [{} for _ in wanted]

    def respond(numbers: list[Tensor]) -> list[Rows]:
        columns = []
        for number, (kind, of_kind) in enumerate(zip(wanted, numbers, strict=True)):
            rows = rows_of(number, of_kind) if kind.tables else of_kind
            columns += [Rows(table, rows) for table in kind.tables.values()]
        return columns

    none, own = torch.empty(0, dtype=torch.int64, device="cpu"), group.rank
    workers = range(group.world_size)
    requests = [[none if p == own else kind.numbers[p] for kind in wanted] for p in workers]
    lengths = [[len(kind.numbers[p]) for kind in wanted for _ in kind.tables] for p in workers]
    responses = send_requests(group, call, requests, respond, formats, lengths)
    own_columns = iter(respond([kind.numbers[own] for kind in wanted]))
    columns = [iter(response) for response in responses]
    found = []
    for kind in wanted:
        made = {}
        for name, table in kind.tables.items():
            out = made[name] = table.new_empty((sum(map(len, kind.asked.nodes)), *table.shape[1:]))
            copy_rows(*next(own_columns), out, kind.asked.positions[own])
            for p in workers:
                if p != own:
                    copy_rows(next(columns[p]), None, out, kind.asked.positions[p])
        found.append(made)
    return found


# -- seeds that are edges


def draw_pairs(group: Group, graph: WorkerGraph, settings: PairSettings, seeds: Tensor, key: int) -> Pairs:
    """Return the seeds and negative pairs, as positions among their end nodes.

    The negative pairs (u, v') of a seed (u, v) have v' drawn uniformly from v's type. With `both_ends` both nodes are
    drawn, and there are `negatives` pairs per seed on average, rounded up in a batch.

    Args:
        group: the workers.
        graph: this worker's part of the graph.
        settings: settings of the pairs.
        seeds: rows, see [Note: seed edges].
        key: 63 bits, unique for this worker and batch.
    """
    generator = torch.Generator().manual_seed(key)
    by_type = [seeds[seeds[:, SeedColumn.TYPE] == number] for number in range(len(graph.relations))]
    pairs = []
    features = _features_of_seeds(group, graph, by_type)
    for relation, of_type, of_seeds in zip(graph.relations, by_type, features, strict=True):
        src, dst = of_type[:, SeedColumn.SRC].contiguous(), of_type[:, SeedColumn.DST].contiguous()
        pairs.append(PairsOfType(relation.etype, src, dst, of_seeds))
    num_types = len(pairs)
    for (etype, src, dst, _), count in zip(pairs[:num_types], settings.negatives or [], strict=False):
        total = math.ceil(len(src) * count)
        dst = _any_nodes(graph, etype[2], total, generator)
        any_source = settings.both_ends
        src = _any_nodes(graph, etype[0], total, generator) if any_source else src.repeat_interleave(int(count))
        pairs.append(PairsOfType(etype, src, dst, {}))
    numbering = {}
    for ntype in graph.node_types:
        most = sum(len(of_type.src) for of_type in pairs for end in (0, 2) if of_type.etype[end] == ntype)
        numbering[ntype] = Numbering(most, graph.num_nodes)
    for number, (etype, src, dst, _) in enumerate(pairs):
        pairs[number] = pairs[number]._replace(src=numbering[etype[0]].add(src), dst=numbering[etype[2]].add(dst))
    nodes = {ntype: numbers.nodes for ntype, numbers in numbering.items()}
    negative = pairs[num_types:] if settings.negatives is not None else None
    numbers = [of_type[:, SeedColumn.NUMBER].contiguous() for of_type in by_type]
    return Pairs(nodes, pairs[:num_types], negative, numbers)


def _any_nodes(graph: WorkerGraph, ntype: str, count: int, generator: torch.Generator) -> Tensor:
    """Draw global IDs of nodes of a type uniformly, (count,) int64."""
    mine = graph.runs.types == graph.node_types.index(ntype)
    ends = torch.cat([graph.runs.starts[1:], torch.tensor([graph.num_nodes], device="cpu")])
    reached = (ends - graph.runs.starts)[mine].cumsum(0)
    drawn = torch.randint(int(reached[-1]) if count else 1, (count,), generator=generator, device="cpu")
    return drawn + (ends[mine] - reached)[torch.searchsorted(reached, drawn, right=True)]


def _features_of_seeds(group: Group, graph: WorkerGraph, by_type: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """Fetch the seeds' IDs and features from their owners; for every edge type (S, ...) each."""
    wanted = []
    for relation, of_type in zip(graph.relations, by_type, strict=True):
        asked = NodesByOwner.sort(of_type[:, SeedColumn.DST].contiguous(), graph.node_ranges)
        places = [of_type[positions, SeedColumn.PLACE] for positions in asked.positions]
        wanted.append(WantedRows(relation.features, asked, places))
    call = f"{graph.signature}: seed edges"
    found = fetch_rows(group, call, wanted, lambda kind, places: graph.relations[kind].rows[places])
    ids = ({EID: of_type[:, SeedColumn.ID].contiguous()} for of_type in by_type)
    return [of_type | columns for of_type, columns in zip(ids, found, strict=True)]
