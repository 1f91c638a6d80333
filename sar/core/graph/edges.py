"""Edge lists of this worker with global IDs, and adding and removing self-loops."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from sar.comm.group import Group
from sar.common_tuples import EID, CanonicalEtype
from sar.core.graph.queries import GraphQueries
from sar.core.relation import Relation, Structure
from sar.errors import GraphError
from sar.kernels import EdgeBlock
from sar.tensors.ids import to_offsets

NEW = -1
"""Position of an added edge."""

Columns = dict[str, Tensor]
"""Edge fields, (E, ...) each."""


class InEdges(NamedTuple):
    """The edges of one type into this worker, by destination. Those of one node are in the visible order."""

    etype: CanonicalEtype
    indptr: Tensor  # (N_dst + 1,) int64
    src: Tensor  # (E,) int64: global IDs
    edges: Tensor  # (E,) int64: rows in `edata`

    def rows(self) -> Tensor:
        """The row of each edge's destination, (E,) int64."""
        return torch.repeat_interleave(self.indptr.diff())


def in_edges(graph: GraphQueries) -> list[InEdges]:
    """The in-edges of every edge type, in CPU memory. They are not cached. Raises for message flow graphs."""
    if graph.is_block:
        raise GraphError("Neighbors are sampled from whole graphs, not from message flow graphs; pass the full graph.")
    lists = []
    for relation in graph._relations.values():
        ids_by_part = source_ids(graph._structure, relation)
        sources = [ids[block.cols.long()] for ids, block in zip(ids_by_part, relation.blocks, strict=True)]
        destinations = [block.destinations(0, block.num_edges) for block in relation.blocks]
        order = torch.argsort(relation.in_edge_order(destinations), stable=True)
        src, indptr = relation.in_edge_order(sources)[order], to_offsets(relation.in_degrees)
        lists.append(InEdges(relation.etype, indptr.cpu(), src.cpu(), order.cpu()))
    return lists


def edges_into(graph: GraphQueries, nodes: Tensor, etype: CanonicalEtype | str | None = None) -> tuple[Tensor, Tensor]:
    """The edges into some of this worker's nodes, which are distinct rows, (K,) integer.

    Returns global IDs of the sources and rows of the destinations, (E,) int64 each, by source partition, then by row.
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
    """Concatenate the positions `begin[i]` to `end[i]` - 1 of all runs i; return them, and i for each position."""
    counts = end - begin
    run = torch.repeat_interleave(counts)
    offset = (begin - (counts.cumsum(0) - counts))[run]
    return torch.arange(len(run), device=begin.device) + offset, run


def source_ids(structure: Structure, relation: Relation) -> list[Tensor]:
    """Global IDs of the nodes that a relation reads in each partition, (N_read,) int64; all nodes of this worker's."""
    starts = [start for start, _ in structure.node_ranges]
    ids = [halo.long() + start for halo, start in zip(relation.halos, starts, strict=True)]
    ids[structure.group.rank] = structure.src.ids[relation.etype[0]]
    return ids


def change_self_loops(
    relation: Relation, columns: Columns, group: Group, part: int, first_node: int | None
) -> tuple[Relation, Columns]:
    """Remove self-loops from a relation and its edge fields or, with `first_node`, add one to each node.

    A new edge is the last edge of its node on this worker. As in DGL, its fields are 1, except for its ID (`_ID`):
    new IDs follow all present and earlier IDs of all workers, in the order of global node IDs. `first_node` is this
    worker's first node. The relation's source and destination types are equal.
    """
    old = relation.blocks[part]
    old_dst = old.destinations(0, old.num_edges)
    cols, dst, positions = old.cols, old_dst, old.ids(0, old.num_edges)
    if first_node is None:
        rows = (cols != dst).nonzero().squeeze(1)
    else:
        nodes = torch.arange(relation.num_dst, device=dst.device)
        cols, dst = torch.cat([cols, nodes.to(cols.dtype)]), torch.cat([dst, nodes])
        positions = torch.cat([positions, torch.full_like(nodes, NEW)])
        rows = torch.argsort(dst, stable=True)
    cols, dst, positions = cols[rows], dst[rows], positions[rows]
    own = EdgeBlock.from_coo(cols, dst, old.num_src, old.num_dst, edge_offset=old.edge_offset)
    growth = own.num_edges - old.num_edges
    group.agree("counting edges after a change of self-loops")
    known = columns[EID].max().item() if len(columns.get(EID, ())) else -1
    growths, greatest = zip(*group.gather_numbers([growth, int(known)], "edge counts and IDs"), strict=True)
    next_id = max(relation.next_id, 1 + max(greatest))
    everything = torch.arange(relation.num_edges, device=dst.device)
    end = old.edge_offset + old.num_edges
    new_ids = dst[positions == NEW] + next_id + (first_node or 0)
    positions = torch.cat([everything[: old.edge_offset], positions, everything[end:]])
    num_src, num_dst, order = relation.num_src, relation.num_dst, relation.unchanged_order
    changed = replace(
        relation,
        blocks=[*relation.blocks[:part], own, *(block.shifted(growth) for block in relation.blocks[part + 1 :])],
        num_edges_global=relation.num_edges_global + sum(growths),
        in_degrees=relation.in_degrees + dst.bincount(minlength=num_dst) - old_dst.bincount(minlength=num_dst),
        out_degrees=relation.out_degrees + cols.bincount(minlength=num_src) - old.cols.bincount(minlength=num_src),
        message_order=_moved(order, positions, torch.iinfo(order.dtype).max),  # puts new edges last
        next_id=next_id,
    )
    return changed, {name: _moved(column, positions, new_ids if name == EID else 1) for name, column in columns.items()}


def _moved(column: Tensor, positions: Tensor, new: Tensor | int) -> Tensor:
    """The rows of the column at `positions`, with the values `new` at positions `NEW`."""
    # Indexing an empty column would fail.
    moved = column[positions.clamp(min=0)] if len(column) else column.new_empty(len(positions), *column.shape[1:])
    moved[positions == NEW] = new
    return moved
