"""This worker's edges one by one: in-edges with global IDs, and relations with other self-loops."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sar.comm.group import Group
from sar.common_tuples import EID, CanonicalEtype
from sar.core.graph.queries import GraphQueries
from sar.core.relation import Relation, Structure
from sar.errors import GraphError
from sar.id_slices import count_ids, to_offsets
from sar.kernels import EdgeBlock

NEW = -1
"""The position of an edge that was not there before."""

Columns = dict[str, Tensor]
"""Edge fields, (E, ...) each."""


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
    """The in-edges of every edge type, in CPU memory; made anew by each call. A message flow graph is a GraphError."""
    if graph.is_block:
        raise GraphError("Neighbors are sampled from whole graphs, not from message flow graphs; pass the full graph.")
    return [_in_edges_of(graph._structure, graph._relation(etype)) for etype in graph.canonical_etypes]


def edges_into(graph: GraphQueries, nodes: Tensor, etype: CanonicalEtype | str | None = None) -> tuple[Tensor, Tensor]:
    """The edges into some of this worker's nodes, given by their rows, (K,) integer, distinct.

    Returns global IDs of the sources and rows of the destinations, (E,) int64 each; by source partition, then by row.
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
    destinations = [block.destinations(0, block.num_edges) for block in relation.blocks]
    order = torch.argsort(relation.in_edge_order(destinations), stable=True)
    indptr = to_offsets(relation.in_degrees)
    return InEdges(relation.etype, indptr.cpu(), relation.in_edge_order(sources)[order].cpu(), order.cpu())


@dataclass(frozen=True)
class _OwnEdges:
    """The edges within this worker: sources, destinations, and their positions among all edges, (E_own,) each."""

    cols: Tensor
    dst: Tensor
    positions: Tensor

    @classmethod
    def of(cls, block: EdgeBlock) -> "_OwnEdges":
        return cls(block.cols, block.destinations(0, block.num_edges), block.ids(0, block.num_edges))

    def __getitem__(self, rows: Tensor) -> "_OwnEdges":
        return _OwnEdges(self.cols[rows], self.dst[rows], self.positions[rows])


def without_self_loops(relation: Relation, columns: Columns, group: Group, part: int) -> tuple[Relation, Columns]:
    """The relation without edges from a node to itself, and its edge fields."""
    own = _OwnEdges.of(relation.blocks[part])
    return _with_own_edges(relation, columns, own[own.cols != own.dst], group, part)


def with_self_loops(
    relation: Relation, columns: Columns, group: Group, part: int, first_node: int
) -> tuple[Relation, Columns]:
    """The relation with one more edge from each node to itself, as the last of the node's own-shard edges.

    New edges get 1 in every field, as in DGL, and IDs (`_ID`) that count on from the old ones by global node ID;
    `first_node` is this worker's first one. The relation's source type is its destination type.
    """
    own = _OwnEdges.of(relation.blocks[part])
    nodes = torch.arange(relation.num_dst, device=own.dst.device)
    longer = _OwnEdges(
        torch.cat([own.cols, nodes.to(own.cols.dtype)]),
        torch.cat([own.dst, nodes]),
        torch.cat([own.positions, torch.full_like(nodes, NEW)]),
    )
    return _with_own_edges(relation, columns, longer, group, part, relation.num_edges_global + first_node)


def _with_own_edges(
    relation: Relation, columns: Columns, edges: _OwnEdges, group: Group, part: int, first_id: int = 0
) -> tuple[Relation, Columns]:
    """The relation with other edges within this worker; the new one into node i gets the ID `first_id` + i."""
    old = relation.blocks[part]
    edges = edges[torch.argsort(edges.dst, stable=True)]
    own = EdgeBlock.from_coo(edges.cols, edges.dst, old.num_src, old.num_dst, edge_offset=old.edge_offset)
    growth = own.num_edges - old.num_edges
    later = [block.shifted(growth) for block in relation.blocks[part + 1 :]]
    group.agree("counting edges after a change of self-loops")
    total_growth = sum(group.gather_numbers(growth, "edge counts"))
    before = _OwnEdges.of(old)
    num_src, num_dst = relation.num_src, relation.num_dst
    in_growth = count_ids(edges.dst, num_dst) - count_ids(before.dst, num_dst)
    out_growth = count_ids(edges.cols, num_src) - count_ids(before.cols, num_src)
    everything = torch.arange(relation.num_edges, device=edges.dst.device)
    end = old.edge_offset + old.num_edges
    positions = torch.cat([everything[: old.edge_offset], edges.positions, everything[end:]])
    order = relation.unchanged_order
    changed = replace(
        relation,
        blocks=[*relation.blocks[:part], own, *later],
        num_edges_global=relation.num_edges_global + total_growth,
        in_degrees=relation.in_degrees + in_growth,
        out_degrees=relation.out_degrees + out_growth,
        message_order=_moved(order, positions, torch.iinfo(order.dtype).max),  # new ones come last
    )
    new_ids = edges.dst[edges.positions == NEW] + first_id
    return changed, {name: _moved(column, positions, new_ids if name == EID else 1) for name, column in columns.items()}


def _moved(column: Tensor, positions: Tensor, new: Tensor | int) -> Tensor:
    """The column with the rows at `positions`, and `new` where these are `NEW`."""
    # An empty column has no row to take for the new edges.
    moved = column[positions.clamp(min=0)] if len(column) else column.new_empty(len(positions), *column.shape[1:])
    moved[positions == NEW] = new
    return moved
