"""One layer of neighbor sampling, by all workers together.

[Note: in step]
A node's in-edges are on its owner. So each layer takes two exchanges: the nodes whose neighbors are wanted go to their
owners, and the drawn edges come back. Workers without seeds take part, because others may ask them. What is drawn for a
node depends on the asker's key, the layer and the node, not on who draws, or when.

The workers agree once, on the batch: its exchanges follow from that, in number and order, and messages tell their own
lengths.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sar.comm.group import Group
from sar.common_tuples import EID, CanonicalEtype
from sar.id_slices import to_offsets
from sar.sampling.draws import Numbering, derive_key, draw_in_edges
from sar.sampling.owner_requests import NodesByOwner, request_columns
from sar.sampling.worker_graph import WorkerGraph, WorkerRelation


@dataclass(frozen=True)
class LayerSettings:
    """The draws of one layer; `exclude` and `among` leave edges out after the draws, as DGL does."""

    fanouts: Sequence[int]  # edges to draw at each node, for every edge type
    replace: bool  # draw with replacement
    key: int  # 63 bits that belong to this worker, batch and layer
    exclude: Tensor | None = None  # (X,) int64 IDs of edges to leave out
    among: Tensor | None = None  # (A,) int64 distinct global IDs; edges from other nodes are left out


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


def sample_layer(
    group: Group, graph: WorkerGraph, destinations: Mapping[str, Tensor], settings: LayerSettings, call: str
) -> SampledLayer:
    """Sample in-edges of the destinations, distinct global IDs of every node type, (n,) int64 each.

    The workers have agreed on the batch, inside `group.guard()`: see [Note: in step]. `call` is for errors.
    """
    relations = [number for number, fanout in enumerate(settings.fanouts) if fanout]
    ntypes = sorted({graph.relations[number].etype[2] for number in relations})
    asked = {ntype: NodesByOwner.sort(destinations[ntype], graph.node_ranges) for ntype in ntypes}
    among = [] if settings.among is None else [settings.among]
    requests = [
        [torch.tensor([settings.key], device="cpu"), *among, *(asked[ntype].nodes[worker] for ntype in ntypes)]
        for worker in range(group.world_size)
    ]
    formats = [field for number in relations for field in graph.relations[number].formats]
    by_owner = request_columns(group, call, requests, lambda request: _draw(graph, settings, ntypes, request), formats)
    columns = (torch.cat(pieces) if len(pieces) > 1 else pieces[0] for pieces in zip(*by_owner, strict=True))
    edges = []
    for number, relation in enumerate(graph.relations):
        if number in relations:
            counts, *values = (next(columns) for _ in relation.formats)
            indptr, values = asked[relation.etype[2]].restore_segments(counts, values)
        else:
            indptr = torch.zeros(len(destinations[relation.etype[2]]) + 1, dtype=torch.int64, device="cpu")
            values = [column[:0].clone() for column in (relation.src, relation.ids, *relation.features.values())]
        if settings.exclude is not None:
            kept = ~torch.isin(values[1], settings.exclude)
            indptr, values = to_offsets(kept)[indptr], [column[kept] for column in values]
        features = dict(zip([EID, *relation.features], values[1:], strict=True))
        edges.append(SampledEdges(relation.etype, indptr, values[0], features))
    numbering = {}  # of the sources: the destinations come first, then others as they come up
    for ntype, nodes in destinations.items():
        others = sum(len(sampled.src) for sampled in edges if sampled.etype[0] == ntype)
        numbering[ntype] = Numbering(len(nodes) + others, graph.num_nodes)
        numbering[ntype].add(nodes)
    edges = [sampled._replace(src=numbering[sampled.etype[0]].add(sampled.src)) for sampled in edges]
    num_dst = {ntype: len(nodes) for ntype, nodes in destinations.items()}
    return SampledLayer({ntype: numbers.nodes for ntype, numbers in numbering.items()}, num_dst, edges)


def _draw(
    graph: WorkerGraph, settings: LayerSettings, ntypes: Sequence[str], request: Sequence[Tensor]
) -> list[Tensor]:
    """Edges drawn at this worker's nodes, as the columns of `WorkerRelation.formats` of each type that has a fan-out.

    A request has the asker's key, the nodes in `among`, if these are given, and nodes of the types `ntypes`.
    """
    key, *nodes = request
    sources = None if settings.among is None else nodes.pop(0)
    by_type = dict(zip(ntypes, nodes, strict=True))
    columns = []
    for number, (relation, fanout) in enumerate(zip(graph.relations, settings.fanouts, strict=True)):
        if not fanout:
            continue
        asked, drawn_by = by_type[relation.etype[2]], (fanout, settings.replace, derive_key(int(key), number))
        rows = graph.rows(relation.etype[2], asked)
        offsets, picked = draw_in_edges(rows, asked, relation.indptr, relation.weights, *drawn_by)
        if sources is not None:
            offsets, picked = keep_sources(graph, relation, offsets, picked, sources)
        # index_select is several times faster than indexing.
        columns += [offsets.diff(), relation.src.index_select(0, picked), relation.ids.index_select(0, picked)]
        if relation.features:
            rows = relation.rows.index_select(0, picked)
            columns += [feature.index_select(0, rows) for feature in relation.features.values()]
    return columns


def keep_sources(
    graph: WorkerGraph, relation: WorkerRelation, offsets: Tensor, picked: Tensor, sources: Tensor
) -> tuple[Tensor, Tensor]:
    """Of edges as `draw_in_edges` gives them those from some sources, (A,) int64 distinct global IDs."""
    chosen = Numbering(len(sources), graph.num_nodes)
    chosen.add(sources)
    kept = chosen.find(relation.src.index_select(0, picked).long()) >= 0
    return to_offsets(kept)[offsets], picked[kept]
