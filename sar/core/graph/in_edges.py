"""A worker's in-edges by destination, with sources as global IDs: what neighbors are sampled from."""

from typing import NamedTuple

import torch
from torch import Tensor

from sar.common_tuples import CanonicalEtype
from sar.core.graph.graph import GraphShardManager
from sar.core.relation import Relation, Structure
from sar.errors import GraphError


class InEdges(NamedTuple):
    """The edges of one type into this worker, by destination; those of one node in the visible order."""

    etype: CanonicalEtype
    indptr: Tensor  # (N_dst + 1,) int64
    src: Tensor  # (E,) int64: global IDs
    edges: Tensor  # (E,) int64: rows in `edata`


def in_edges(graph: GraphShardManager) -> list[InEdges]:
    """The in-edges of every edge type, in CPU memory; made anew by each call.

    Raises:
        GraphError: for a message flow graph.
    """
    if graph.is_block:
        raise GraphError("Neighbors are sampled from whole graphs, not from message flow graphs; pass the full graph.")
    return [_of_relation(graph._structure, graph._relation(etype)) for etype in graph.canonical_etypes]


def _of_relation(structure: Structure, relation: Relation) -> InEdges:
    sources = []
    for p, (block, halo) in enumerate(zip(relation.blocks, relation.halos, strict=True)):
        own = p == structure.group.rank
        ids = structure.src.ids[relation.etype[0]] if own else halo.long() + structure.node_ranges[p][0]
        sources.append(ids[block.cols.long()])
    destinations = torch.cat([block.destinations(0, block.num_edges) for block in relation.blocks])
    order = torch.argsort(destinations, stable=True)
    indptr = torch.nn.functional.pad(relation.in_degrees.cumsum(0), (1, 0))
    return InEdges(relation.etype, indptr.cpu(), torch.cat(sources)[order].cpu(), order.cpu())
