"""One layer of neighbor sampling, by all workers together.

[Note: in step]
A node's in-edges are on its owner. So each layer takes two exchanges: the nodes whose neighbors are wanted go to their
owners, and the drawn edges come back. Workers without seeds take part, because others may ask them. What is drawn for a
node depends on the asker's key, the layer and the node, not on who draws, or when.

The workers agree once, on the batch: its exchanges follow from that, in number and order, and messages tell their own
lengths.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sar.comm.collectives import exchange_buffers
from sar.comm.group import Group
from sar.common_tuples import EID, CanonicalEtype
from sar.kernels.neighbor_sampling import Numbering, derive_key, draw_in_edges, order_segments, to_offsets
from sar.sampling.local_graph import LocalGraph, LocalRelation
from sar.sampling.packing import Form, pack, unpack

_ID = Form(torch.int64)
_NOTHING = torch.empty(0, dtype=torch.uint8)


class HopEdges(NamedTuple):
    """The sampled edges of one type, by destination."""

    etype: CanonicalEtype
    indptr: Tensor  # (N_dst + 1,) int64
    src: Tensor  # (E,) int64: positions among the sources
    features: dict[str, Tensor]  # (E, ...) each; `_ID` among them


class Hop(NamedTuple):
    """The sampled edges of one layer, and the nodes that they join."""

    nodes: dict[str, Tensor]  # global IDs of the sources of every type, (N_src,) int64; the destinations come first
    num_dst: dict[str, int]
    edges: list[HopEdges]


class _Asked(NamedTuple):
    """Nodes sorted by owner."""

    nodes: Tensor  # (n,) int64
    begin: list[int]  # (W + 1,): those of worker p are nodes[begin[p]:begin[p + 1]]
    order: Tensor | None  # (n,) int64, where each node was before; None for the same order

    @property
    def place(self) -> Tensor | None:
        """(n,) int64, where each node of the order before is."""
        if self.order is None:
            return None
        place = torch.empty_like(self.order)
        place[self.order] = torch.arange(len(self.order))
        return place

    def of(self, worker: int) -> Tensor:
        return self.nodes[self.begin[worker] : self.begin[worker + 1]]


def sort_by_owner(graph: LocalGraph, nodes: Tensor) -> _Asked:
    """The nodes sorted by owner; those of one owner keep their order."""
    workers = len(graph.node_ranges)
    if workers == 1:
        return _Asked(nodes, [0, len(nodes)], None)
    owners = graph.owners(nodes)
    order = torch.argsort(owners, stable=True)
    return _Asked(nodes.index_select(0, order), to_offsets(torch.bincount(owners, minlength=workers)).tolist(), order)


def sample_hop(
    group: Group,
    graph: LocalGraph,
    destinations: Mapping[str, Tensor],
    fanouts: Sequence[int],
    replace: bool,
    key: int,
    words: str,
) -> Hop:
    """Sample in-edges of the destinations: see [Note: in step].

    Args:
        group: to talk to the other workers, which have agreed on the batch; inside its `guard()`.
        graph: this worker's part of the graph.
        destinations: distinct global IDs of every node type, (n,) int64 each.
        fanouts: edges to draw at each node, for every edge type.
        replace: draw with replacement.
        key: 63 bits that belong to this worker, batch and layer.
        words: what the workers are doing, for errors.
    """
    drawn = [number for number, fanout in enumerate(fanouts) if fanout]
    needed = sorted({graph.relations[number].etype[2] for number in drawn})
    asked = {ntype: sort_by_owner(graph, destinations[ntype]) for ntype in needed}
    everyone, rank = range(group.world_size), group.rank
    requests = [
        pack([torch.tensor([key]), *(asked[ntype].of(p) for ntype in needed)]) if p != rank else _NOTHING
        for p in everyone
    ]
    arrived = exchange_buffers(group, f"{words}: nodes", requests)
    forms = [form for number in drawn for form in graph.relations[number].forms]

    def answer(key: int, nodes: Sequence[Tensor]) -> list[Tensor]:
        by_type = dict(zip(needed, nodes, strict=True))
        return [
            column
            for number in drawn
            for column in _draw(graph, graph.relations[number], by_type, fanouts[number], replace, key, number)
        ]

    answers = []
    for p in everyone:
        if p == rank:
            answers.append(_NOTHING)
            continue
        theirs, *nodes = unpack(arrived[p], [_ID] * (1 + len(needed)))
        answers.append(pack(answer(int(theirs), nodes)))
    own = answer(key, [asked[ntype].of(rank) for ntype in needed])
    returned = exchange_buffers(group, f"{words}: edges", answers)
    parts = [own if p == rank else unpack(returned[p], forms) for p in everyone]
    columns = iter([torch.cat(pieces) if len(pieces) > 1 else pieces[0] for pieces in zip(*parts, strict=True)])
    return _join(graph, destinations, asked, drawn, columns)


def _draw(
    graph: LocalGraph,
    relation: LocalRelation,
    nodes: Mapping[str, Tensor],
    fanout: int,
    replace: bool,
    key: int,
    number: int,
) -> list[Tensor]:
    """The columns of `relation.forms` of edges drawn at this worker's nodes."""
    ntype = relation.etype[2]
    rows, key = graph.rows(ntype, nodes[ntype]), derive_key(key, number)
    offsets, picked = draw_in_edges(rows, nodes[ntype], relation.indptr, relation.weights, fanout, replace, key)
    # index_select is several times faster than indexing.
    columns = [offsets.diff(), relation.src.index_select(0, picked), relation.ids.index_select(0, picked)]
    if relation.features:
        rows = relation.rows.index_select(0, picked)
        columns += [feature.index_select(0, rows) for feature in relation.features.values()]
    return columns


def _join(
    graph: LocalGraph,
    destinations: Mapping[str, Tensor],
    asked: Mapping[str, _Asked],
    drawn: Sequence[int],
    columns: Iterator[Tensor],
) -> Hop:
    """Number the sources, and put the edges, which come by owner, into the order of the destinations."""
    sampled, places = {}, {ntype: nodes.place for ntype, nodes in asked.items()}
    for number in drawn:
        relation = graph.relations[number]
        place = places[relation.etype[2]]
        counts, *values = (next(columns) for _ in relation.forms)
        if place is None:
            indptr = to_offsets(counts)
        else:
            indptr, order = order_segments(place, counts)
            values = [column.index_select(0, order) for column in values]
        sampled[number] = (indptr, *values)
    numbering = {}
    for ntype, nodes in destinations.items():
        new = sum(len(sampled[number][1]) for number in drawn if graph.relations[number].etype[0] == ntype)
        numbering[ntype] = Numbering(len(nodes) + new, graph.num_nodes)
        numbering[ntype].add(nodes)
    edges = []
    for number, relation in enumerate(graph.relations):
        if number in sampled:
            indptr, src, *values = sampled[number]
            numbers = numbering[relation.etype[0]].add(src)
        else:
            indptr = torch.zeros(len(destinations[relation.etype[2]]) + 1, dtype=torch.int64)
            numbers, values = indptr[:0], [relation.ids[:0], *(f[:0] for f in relation.features.values())]
        fields = dict(zip([EID, *relation.features], values, strict=True))
        edges.append(HopEdges(relation.etype, indptr, numbers, fields))
    num_dst = {ntype: len(nodes) for ntype, nodes in destinations.items()}
    return Hop({ntype: numbers.nodes for ntype, numbers in numbering.items()}, num_dst, edges)
