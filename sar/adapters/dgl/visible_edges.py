"""The edges that one partition owns, in the order in which sar shows them: source partition, destination, edge ID."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sar.adapters.dgl.graph_file import DST, SRC, LocalGraph
from sar.adapters.dgl.partition_json import PartitionJson
from sar.common_tuples import EID, ORIG_ID
from sar.errors import PartitionError
from sar.kernels.pieces import pieces


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


def order_edges(spec: PartitionJson, part: int, graph: LocalGraph) -> VisibleEdges:
    """Pick out and sort the edges of a partition; takes them out of `graph`.

    Raises:
        PartitionError: they are not the edges that the JSON file promises.
    """
    # Memory: temporaries are cut into chunks, and every column of the graph is let go once it is sorted. So beside the
    # graph at most 20 bytes an edge are held while sorting, and 16 afterwards.
    columns = graph.edges
    rows, bounds = _visible_rows(spec, part, graph)
    return VisibleEdges(
        src=_pick(columns.pop(SRC), rows, graph.node_id),
        dst=_pick(columns.pop(DST), rows, graph.node_id),
        edge_id=_pick(columns.pop(EID), rows),
        orig_edge_id=_pick(columns.pop(ORIG_ID), rows) if ORIG_ID in columns else None,
        bounds=bounds,
    )


def _visible_rows(spec: PartitionJson, part: int, graph: LocalGraph) -> tuple[Tensor, Tensor]:
    """Row numbers of the partition's edges in visible order, (E,), and the shards' bounds."""
    src, dst, edge_id = graph.edges[SRC], graph.edges[DST], graph.edges[EID]
    inner = graph.is_inner[dst.long()]
    count = int(inner.sum())
    first_come = bool(inner[:count].all())  # as DGL writes them
    owned = None if first_come else inner.nonzero().squeeze(1)
    edge_id = edge_id[:count] if owned is None else edge_id[owned]
    _check_edge_ids(spec, part, edge_id)

    start, end = spec.partition_ranges[part]
    ends = torch.tensor([end for _, end in spec.partition_ranges])
    place = torch.empty(count, dtype=torch.int64)  # by source partition, then destination
    counts = torch.zeros(spec.num_parts, dtype=torch.int64)
    for chunk in pieces(count):
        at = chunk if owned is None else owned[chunk]
        source_part = torch.searchsorted(ends, graph.node_id[src[at].long()], right=True)
        counts += torch.bincount(source_part, minlength=spec.num_parts)
        place[chunk] = source_part * (end - start) + graph.node_id[dst[at].long()] - start
    if bool((edge_id[1:] > edge_id[:-1]).all()):
        order = torch.from_numpy(np.argsort(place.numpy(), kind="stable"))
    else:
        order = torch.from_numpy(np.lexsort((edge_id.numpy(), place.numpy())))
    bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return order if owned is None else owned[order], bounds


def _pick(column: Tensor, rows: Tensor, global_id: Tensor | None = None) -> Tensor:
    """Rows of a column, int64; with `global_id`, what the column's values stand for."""
    result = torch.empty(len(rows), dtype=torch.int64)
    for chunk in pieces(len(rows)):
        values = column[rows[chunk]]
        result[chunk] = values if global_id is None else global_id[values.long()]
    return result


def _check_edge_ids(spec: PartitionJson, part: int, edge_id: Tensor) -> None:
    start, end = int(spec.edge_ranges[part, 0, 0]), int(spec.edge_ranges[part, -1, 1])
    complete = len(edge_id) == end - start
    seen = torch.zeros(end - start, dtype=torch.bool)
    for chunk in pieces(len(edge_id) if complete else 0):
        number = edge_id[chunk] - start
        complete &= bool(((number >= 0) & (number < end - start)).all())
        seen[number.clamp(0, end - start - 1)] = True
    if not (complete and bool(seen.all())):
        raise PartitionError(
            f"{spec.files[part]['part_graph']} holds {len(edge_id)} edges into the nodes of partition {part}; expected "
            f"one for every edge ID in [{start}, {end}), as {spec.path.name} says. {spec.edge_mend}"
        )
