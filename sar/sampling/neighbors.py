"""Neighbor sampling, layer after layer, by all workers together.

[Note: in step]
A node's in-edges are on its owner. So each layer takes two exchanges: the nodes whose neighbors are wanted go to their
owners, and the drawn edges come back. Workers without seeds take part, because others may ask them. What is drawn for a
node depends on the asker's key, the layer and the node, not on who draws, or when.

The workers agree once, on the batch: its exchanges follow from that, in number and order, and messages tell their own
lengths.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sar.comm.group import Group
from sar.common_tuples import EID, CanonicalEtype
from sar.id_slices import to_offsets
from sar.sampling.draws import Numbering, derive_key, draw_in_edges
from sar.sampling.owner_requests import NodesByOwner, Rows, send_requests
from sar.sampling.worker_graph import WorkerGraph


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


def sample_layers(
    group: Group,
    graph: WorkerGraph,
    seeds: Mapping[str, Tensor],
    key: int,
    fanouts: Sequence[Sequence[int]],
    replace: bool,
    exclude: Tensor | None = None,
) -> list[SampledLayer]:
    """Sample one layer after another, from the seeds on; the input layer comes first.

    `fanouts` has the edges to draw at a node by layer and edge type; the rest is as of `sample_layer`.
    """
    layers: list[SampledLayer] = []
    nodes = seeds
    for number in reversed(range(len(fanouts))):
        call, layer_key = f"{graph.signature}, layer {number}", derive_key(key, number)
        layer = sample_layer(group, graph, nodes, layer_key, fanouts[number], call, replace, exclude=exclude)
        layers.insert(0, layer)
        nodes = layer.nodes
    return layers


def sample_layer(
    group: Group,
    graph: WorkerGraph,
    destinations: Mapping[str, Tensor],
    key: int,
    fanouts: Sequence[int],
    call: str,
    replace: bool = False,
    *,
    exclude: Tensor | None = None,
) -> SampledLayer:
    """Sample in-edges of nodes of any workers, which have agreed on the batch: see [Note: in step].

    Args:
        group: the workers; inside `group.guard()`.
        graph: this worker's part of the graph.
        destinations: distinct global IDs of every node type, (n,) int64 each.
        key: 63 bits that belong to this worker, batch and layer.
        fanouts: edges to draw at each node, for every edge type.
        call: name of the layer, for errors.
        replace: draw with replacement.
        exclude: IDs of edges that are left out after the draws, as DGL does, (X,) int64.
    """
    relations = [number for number, fanout in enumerate(fanouts) if fanout]
    ntypes = sorted({graph.relations[number].etype[2] for number in relations})
    asked = {ntype: NodesByOwner.sort(destinations[ntype], graph.node_ranges) for ntype in ntypes}
    # A request has the asker's key, and the nodes of each type.
    requests = [
        [torch.tensor([key], device="cpu"), *(asked[ntype].nodes[worker] for ntype in ntypes)]
        for worker in range(group.world_size)
    ]

    def draw(request: list[Tensor]) -> list[Tensor | Rows]:
        """Draw edges at this worker's nodes; the columns of `WorkerRelation.formats` of each type with a fan-out."""
        asker_key, *nodes = request
        by_type = dict(zip(ntypes, nodes, strict=True))
        columns: list[Tensor | Rows] = []
        for number in relations:
            relation, wanted = graph.relations[number], by_type[graph.relations[number].etype[2]]
            rows, relation_key = graph.rows(relation.etype[2], wanted), derive_key(int(asker_key), number)
            offsets, picked = draw_in_edges(
                rows, wanted, relation.indptr, relation.weights, fanouts[number], replace, relation_key
            )
            columns += [offsets.diff(), Rows(relation.src, picked), Rows(relation.ids, picked)]
            if relation.features:
                rows = relation.rows.index_select(0, picked)  # several times faster than indexing
                columns += [Rows(feature, rows) for feature in relation.features.values()]
        return columns

    formats = [field for number in relations for field in graph.relations[number].formats]
    by_owner = send_requests(group, call, requests, draw, formats)()
    columns = (torch.cat(pieces) if len(pieces) > 1 else pieces[0] for pieces in zip(*by_owner, strict=True))
    edges = []
    for number, relation in enumerate(graph.relations):
        if number in relations:
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
    numbering = {}  # of the sources: the destinations come first, then others as they come up
    for ntype, nodes in destinations.items():
        others = sum(len(sampled.src) for sampled in edges if sampled.etype[0] == ntype)
        numbering[ntype] = Numbering(len(nodes) + others, graph.num_nodes)
        numbering[ntype].add(nodes)
    edges = [sampled._replace(src=numbering[sampled.etype[0]].add(sampled.src)) for sampled in edges]
    num_dst = {ntype: len(nodes) for ntype, nodes in destinations.items()}
    return SampledLayer({ntype: numbers.nodes for ntype, numbers in numbering.items()}, num_dst, edges)
