"""Removing and adding self-loops: only the edges within each worker change."""

from dataclasses import replace

import torch
from torch import Tensor

from sar.comm.group import Group
from sar.common_tuples import EID
from sar.core.relation import Relation
from sar.kernels import EdgeBlock

NEW = -1  # in place of the position of an old edge


def without_self_loops(
    relation: Relation, columns: dict[str, Tensor], group: Group
) -> tuple[Relation, dict[str, Tensor]]:
    """The relation without edges from a node to itself, and its edge fields, (E, ...) each."""
    own, dst, positions = _own_edges(relation, group)
    keep = own.cols != dst
    return _with_own_edges(relation, columns, group, own.cols[keep], dst[keep], positions[keep], 0)


def with_self_loops(
    relation: Relation, columns: dict[str, Tensor], group: Group, first_node: int
) -> tuple[Relation, dict[str, Tensor]]:
    """The relation with one more edge from each node to itself, as the last of the node's own-shard edges.

    New edges get 1 in every field, as in DGL, and IDs (`_ID`) that count on from the old ones by global node ID.

    Args:
        relation: its source type is its destination type.
        columns: edge fields, (E, ...) each.
        group: this worker's end of the group.
        first_node: global ID of this worker's first node.
    """
    own, dst, positions = _own_edges(relation, group)
    loops = torch.arange(relation.num_dst, device=dst.device)
    cols, dst = torch.cat([own.cols, loops.to(own.cols.dtype)]), torch.cat([dst, loops])
    positions = torch.cat([positions, torch.full_like(loops, NEW)])
    first_id = relation.num_edges_global + first_node
    return _with_own_edges(relation, columns, group, cols, dst, positions, first_id)


def _own_edges(relation: Relation, group: Group) -> tuple[EdgeBlock, Tensor, Tensor]:
    own = relation.blocks[group.rank]
    return own, own.destinations(0, own.num_edges), own.ids(0, own.num_edges)


def _with_own_edges(
    relation: Relation,
    columns: dict[str, Tensor],
    group: Group,
    cols: Tensor,
    dst: Tensor,
    positions: Tensor,
    first_id: int,
) -> tuple[Relation, dict[str, Tensor]]:
    """The relation with other edges in the own shard; `positions` are those of the old edges, or `NEW`."""
    old, rank = relation.blocks[group.rank], group.rank
    order = torch.argsort(dst, stable=True)
    cols, dst, positions = cols[order], dst[order], positions[order]
    own = EdgeBlock.from_coo(cols, dst, old.num_src, old.num_dst, edge_offset=old.edge_offset)
    growth = own.num_edges - old.num_edges
    later = [
        EdgeBlock(b.rows, b.indptr, b.cols, b.num_src, b.num_dst, None, b.edge_offset + growth)
        for b in relation.blocks[rank + 1 :]
    ]
    before, after = torch.arange(old.edge_offset), torch.arange(old.edge_offset + old.num_edges, relation.num_edges)
    index = torch.cat([before.to(dst.device), positions, after.to(dst.device)])
    new = index == NEW
    chosen = {}
    for name, column in columns.items():
        # An empty column has no row to take for the new edges.
        values = column[index.clamp(min=0)] if len(column) else column.new_empty(len(index), *column.shape[1:])
        values[new] = dst[positions == NEW] + first_id if name == EID else torch.ones_like(values[new])
        chosen[name] = values
    change = torch.bincount(dst, minlength=relation.num_dst) - torch.bincount(
        old.destinations(0, old.num_edges), minlength=relation.num_dst
    )
    out_change = torch.bincount(cols, minlength=relation.num_src) - torch.bincount(old.cols, minlength=relation.num_src)
    group.agree("counting edges after a change of self-loops")
    grown = torch.stack(group.all_gather(torch.tensor([growth]), "edge counts")).sum()
    changed = replace(
        relation,
        blocks=[*relation.blocks[:rank], own, *later],
        num_edges_global=relation.num_edges_global + int(grown),
        in_degrees=relation.in_degrees + change,
        out_degrees=relation.out_degrees + out_change,
    )
    return changed, chosen
