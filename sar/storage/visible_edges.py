"""The edges that one partition owns, in the order in which sar shows them: source partition, destination, edge ID."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sar.common_tuples import EID, ORIG_ID
from sar.errors import PartitionError
from sar.id_slices import pieces
from sar.storage.local_graph import DST, SRC, LocalGraph
from sar.storage.partition_json import PartitionJson


class VisibleEdges(NamedTuple):
    """In-edges of a partition's own nodes, in visible order, with global IDs (int64).

    src, dst: (E,) node IDs.
    edge_id: (E,).
    orig_edge_id: (E,) IDs in the input graph, where `graph.dgl` has them.
    bounds: (num_parts + 1,) edges from partition p are [bounds[p], bounds[p + 1]).
    """

    src: Tensor
    dst: Tensor
    edge_id: Tensor
    orig_edge_id: Tensor | None
    bounds: Tensor


def order_edges(graph: LocalGraph, node_ranges: list[tuple[int, int]], part: int) -> VisibleEdges:
    """Pick out and sort the edges of a partition; takes them out of `graph`.

    Args:
        graph: the partition and its halo.
        node_ranges: [start, end) of global node IDs of every partition.
        part: the partition.
    """
    # Memory: temporaries are cut into chunks, and every column of the graph is let go once it is sorted. So beside the
    # graph at most 20 bytes an edge are held while sorting, and 16 afterwards.
    columns = graph.edges
    rows, bounds = _visible_rows(graph, node_ranges, part)
    return VisibleEdges(
        src=_pick(columns.pop(SRC), rows, graph.node_id),
        dst=_pick(columns.pop(DST), rows, graph.node_id),
        edge_id=_pick(columns.pop(EID), rows),
        orig_edge_id=_pick(columns.pop(ORIG_ID), rows) if ORIG_ID in columns else None,
        bounds=bounds,
    )


def has_all_edges(graph: LocalGraph, start: int, end: int) -> bool:
    """Whether the edges into the partition's own nodes have each of the IDs `start` to `end` - 1 once."""
    edge_id = graph.edges[EID][_owned(graph)]
    if len(edge_id) != end - start:
        return False
    seen = torch.zeros(end - start, dtype=torch.bool)
    for chunk in pieces(len(edge_id)):
        number = edge_id[chunk] - start
        if not bool(((number >= 0) & (number < end - start)).all()):
            return False
        seen[number] = True
    return bool(seen.all())


def check_edge_ids(spec: PartitionJson, part: int, graph: LocalGraph) -> None:
    """Raise `PartitionError` where a partition's graph has other edges than the JSON file says."""
    start, end = int(spec.edge_ranges[part, 0, 0]), int(spec.edge_ranges[part, -1, 1])
    if not has_all_edges(graph, start, end):
        found = int(graph.is_inner[graph.edges[DST].long()].sum())
        raise PartitionError(
            f"{spec.files[part]['part_graph']} holds {found} edges into the nodes of partition {part}; expected "
            f"one for every edge ID in [{start}, {end}), as {spec.path.name} says. {spec.edge_fix}"
        )


def _owned(graph: LocalGraph) -> slice | Tensor:
    """The edges into own nodes; a slice where they come first, as DGL writes them."""
    inner = graph.is_inner[graph.edges[DST].long()]
    count = int(inner.sum())
    return slice(count) if bool(inner[:count].all()) else inner.nonzero().squeeze(1)


def _visible_rows(graph: LocalGraph, node_ranges: list[tuple[int, int]], part: int) -> tuple[Tensor, Tensor]:
    """Row numbers of the partition's edges in visible order, (E,), and the shards' bounds."""
    src, dst, owned = graph.edges[SRC], graph.edges[DST], _owned(graph)
    edge_id = graph.edges[EID][owned]
    count = len(edge_id)
    start, end = node_ranges[part]
    ends = torch.tensor([end for _, end in node_ranges])
    place = torch.empty(count, dtype=torch.int64)  # by source partition, then destination
    counts = torch.zeros(len(node_ranges), dtype=torch.int64)
    for chunk in pieces(count):
        at = chunk if isinstance(owned, slice) else owned[chunk]
        source_part = torch.searchsorted(ends, graph.node_id[src[at].long()], right=True)
        counts += torch.bincount(source_part, minlength=len(node_ranges))
        place[chunk] = source_part * (end - start) + graph.node_id[dst[at].long()] - start
    if bool((edge_id[1:] > edge_id[:-1]).all()):
        order = torch.from_numpy(np.argsort(place.numpy(), kind="stable"))
    else:
        order = torch.from_numpy(np.lexsort((edge_id.numpy(), place.numpy())))
    bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return order if isinstance(owned, slice) else owned[order], bounds


def _pick(column: Tensor, rows: Tensor, global_id: Tensor | None = None) -> Tensor:
    """Rows of a column, int64; with `global_id`, what the column's values stand for."""
    result = torch.empty(len(rows), dtype=torch.int64)
    for chunk in pieces(len(rows)):
        values = column[rows[chunk]]
        result[chunk] = values if global_id is None else global_id[values.long()]
    return result
