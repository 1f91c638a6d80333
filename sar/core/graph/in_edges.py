"""A worker's in-edges with sources as global IDs: what neighbors are sampled from."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sar.common_tuples import CanonicalEtype
from sar.core.graph.queries import GraphQueries
from sar.core.relation import Relation, Structure
from sar.errors import GraphError


class InEdges(NamedTuple):
    """The edges of one type into this worker, by destination; those of one node in the visible order."""

    etype: CanonicalEtype
    indptr: Tensor  # (N_dst + 1,) int64
    src: Tensor  # (E,) int64: global IDs
    edges: Tensor  # (E,) int64: rows in `edata`

    def rows(self) -> Tensor:
        """The row of each edge's destination, (E,) int64."""
        return torch.repeat_interleave(self.indptr.diff())


def in_edges(graph: GraphQueries) -> list[InEdges]:
    """The in-edges of every edge type, in CPU memory; made anew by each call.

    Raises:
        GraphError: for a message flow graph.
    """
    if graph.is_block:
        raise GraphError("Neighbors are sampled from whole graphs, not from message flow graphs; pass the full graph.")
    return [_in_edges_of(graph._structure, graph._relation(etype)) for etype in graph.canonical_etypes]


def edges_into(graph: GraphQueries, nodes: Tensor, etype: CanonicalEtype | str | None = None) -> tuple[Tensor, Tensor]:
    """The edges into some of this worker's nodes.

    Args:
        graph: a whole graph or a message flow graph.
        nodes: rows of nodes, (K,) integer, distinct.
        etype: edge type; may be left out where there is one.

    Returns:
        Global IDs of the sources and rows of the destinations, (E,) int64 each; by source partition, then by row.
    """
    relation = graph._relation(etype)
    chosen = torch.zeros(relation.num_dst, dtype=torch.bool, device=graph.device)
    chosen[nodes] = True
    src, dst = [], []
    for block, ids in zip(relation.blocks, source_ids(graph._structure, relation), strict=True):
        runs = chosen[block.rows.long()].nonzero().squeeze(1)
        edges, run = expand_runs(block.indptr[runs].long(), block.indptr[runs + 1].long())
        src.append(ids[block.cols[edges].long()])
        dst.append(block.rows[runs[run]].long())
    return torch.cat(src), torch.cat(dst)


def expand_runs(begin: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """The positions `begin[i]` to `end[i]` - 1 of all runs i, one run after the other, and i for each position."""
    counts = end - begin
    run = torch.repeat_interleave(counts)
    offset = (begin - (counts.cumsum(0) - counts))[run]
    return torch.arange(len(run), device=begin.device) + offset, run


def source_ids(structure: Structure, relation: Relation) -> list[Tensor]:
    """Global IDs of the nodes that a relation reads, (N_read,) int64 for each source partition; of the own one, all."""
    starts = [start for start, _ in structure.node_ranges]
    ids = [halo.long() + start for halo, start in zip(relation.halos, starts, strict=True)]
    ids[structure.part] = structure.src.ids[relation.etype[0]]
    return ids


def _in_edges_of(structure: Structure, relation: Relation) -> InEdges:
    sources = [
        ids[block.cols.long()] for ids, block in zip(source_ids(structure, relation), relation.blocks, strict=True)
    ]
    order = torch.argsort(torch.cat([block.destinations(0, block.num_edges) for block in relation.blocks]), stable=True)
    indptr = functional.pad(relation.in_degrees.cumsum(0), (1, 0))
    return InEdges(relation.etype, indptr.cpu(), torch.cat(sources)[order].cpu(), order.cpu())
