"""Put the edges of one partition and their features together, shard by shard."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sar.adapters.dgl.edge_type_names import types_of
from sar.adapters.dgl.feature_files import open_features, open_orig_ids, owned_edges
from sar.adapters.dgl.partition_json import PartitionJson
from sar.adapters.dgl.tensor_file import load_permuted
from sar.adapters.dgl.visible_edges import VisibleEdges, chunks
from sar.common_tuples import EID, ETYPE, ORIG_ID, CanonicalEtype, ShardEdgesAndFeatures


class _Column(NamedTuple):
    """One edge field of all shards in visible order; shard p has the rows [bounds[p], bounds[p + 1])."""

    values: Tensor
    bounds: list[int]


def build_shards(
    spec: PartitionJson,
    part: int,
    edges: VisibleEdges,
    edge_types: list[CanonicalEtype],
    *,
    from_dispatch: bool,
    device: torch.device,
) -> list[ShardEdgesAndFeatures]:
    """Read the edge features of a partition and cut edges and features into shards.

    Each shard's tensors are slices: the shards of a field lie one after the other in memory.
    """
    names = [":".join(etype) for etype in edge_types]
    owned = owned_edges(spec, part, edge_types)
    features = open_features(spec, part, owned, from_dispatch=from_dispatch)
    orig_ids = open_orig_ids(spec, part, owned)

    all_rows = edges.bounds.tolist()
    columns = {EID: _Column(edges.edge_id.to(device), all_rows)}
    type_of_edge = types_of(edges.edge_id, spec.edge_ranges) if len(names) > 1 else None
    if type_of_edge is not None:
        columns[ETYPE] = _Column(type_of_edge.to(device), all_rows)
    if orig_ids:
        columns[ORIG_ID] = _Column(torch.empty(len(edges.edge_id), dtype=torch.int64, device=device), all_rows)
    elif edges.orig_edge_id is not None:
        columns[ORIG_ID] = _Column(edges.orig_edge_id.to(device), all_rows)

    for type_id, name in enumerate(names):
        ids_here = [one for one in orig_ids if one.type_id == type_id]
        features_here = [one for one in features if one.type_id == type_id]
        if not ids_here and not features_here:
            continue
        rows = slice(None) if type_of_edge is None else (type_of_edge == type_id).nonzero().squeeze(1)
        bounds = all_rows if isinstance(rows, slice) else torch.searchsorted(rows, edges.bounds).tolist()
        position = _positions(edges.edge_id[rows], int(spec.edge_ranges[part, type_id, 0]))
        for one in ids_here:
            columns[ORIG_ID].values[rows] = load_permuted(one.stored, position, device)
        for one in features_here:
            key = one.name if type_of_edge is None else f"{name}/{one.name}"
            columns[key] = _Column(load_permuted(one.stored, position, device), bounds)

    src, dst = edges.src.to(device), edges.dst.to(device)
    return [
        ShardEdgesAndFeatures(
            (src[begin:end], dst[begin:end]),
            {key: values[bounds[p] : bounds[p + 1]] for key, (values, bounds) in columns.items()},
        )
        for p, (begin, end) in enumerate(pairwise(all_rows))
    ]


def _positions(edge_id: Tensor, first: int) -> Tensor:
    """Where in `edge_id` each of the IDs `first`, `first + 1`, ... stands."""
    count = len(edge_id)
    position = torch.empty(count, dtype=torch.int32 if count < 2**31 else torch.int64)
    for chunk in chunks(count):
        position[edge_id[chunk] - first] = torch.arange(chunk.start, chunk.stop, dtype=position.dtype)
    return position
