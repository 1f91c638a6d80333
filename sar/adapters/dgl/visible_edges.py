"""The edges that one partition owns, in the order in which sar shows them: source partition, destination, edge ID."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sar.adapters.dgl.graph_file import LocalGraph
from sar.adapters.dgl.partition_json import PartitionJson
from sar.errors import PartitionError


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
    """Pick out and sort the edges of a partition.

    Raises:
        PartitionError: they are not the edges that the JSON file promises.
    """
    # Memory: beside the graph, at most 36 bytes an edge are held at any time, 24 of which are kept.
    owned = _owned(graph)
    edge_id = graph.edge_id[owned]
    _check_edge_ids(spec, part, edge_id)
    src = graph.node_id[graph.src[owned].long()]
    ends = torch.tensor([end for _, end in spec.partition_ranges])
    source_part = torch.searchsorted(ends, src, right=True, out_int32=True)
    counts = torch.bincount(source_part, minlength=spec.num_parts)

    start, end = spec.partition_ranges[part]
    place = source_part.long().mul_(end - start)  # by source partition and destination
    del source_part
    place.add_(graph.node_id[graph.dst[owned].long()]).sub_(start)
    if bool((edge_id[1:] > edge_id[:-1]).all()):
        order = torch.from_numpy(np.argsort(place.numpy(), kind="stable"))
    else:
        order = torch.from_numpy(np.lexsort((edge_id.numpy(), place.numpy())))
    del place
    src = src[order]
    return VisibleEdges(
        src=src,
        dst=graph.node_id[graph.dst[owned][order].long()],
        edge_id=edge_id[order],
        orig_edge_id=None if graph.orig_edge_id is None else graph.orig_edge_id[owned][order],
        bounds=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
    )


def _owned(graph: LocalGraph) -> slice | Tensor:
    """Rows of the edges into inner nodes; a slice where they come first, as DGL writes them."""
    mask = graph.is_inner[graph.dst.long()]
    count = int(mask.sum())
    return slice(count) if bool(mask[:count].all()) else mask.nonzero().squeeze(1)


def _check_edge_ids(spec: PartitionJson, part: int, edge_id: Tensor) -> None:
    start, end = int(spec.edge_ranges[part, 0, 0]), int(spec.edge_ranges[part, -1, 1])
    complete = len(edge_id) == end - start and bool(((edge_id >= start) & (edge_id < end)).all())
    if complete:
        seen = torch.zeros(end - start, dtype=torch.bool)
        seen[edge_id - start] = True
        complete = bool(seen.all())
    if not complete:
        raise PartitionError(
            f"{spec.files[part]['part_graph']} holds {len(edge_id)} edges into the nodes of partition {part}; expected "
            f"one for every edge ID in [{start}, {end}), as {spec.path.name} says. {spec.edge_mend}"
        )
