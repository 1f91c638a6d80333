"""Put the edges of one partition and their features together, shard by shard."""

from itertools import pairwise

import torch
from torch import Tensor

from sar.common_tuples import EID, ETYPE, ORIG_ID, CanonicalEtype, ShardEdgesAndFeatures
from sar.id_slices import pieces
from sar.outofcore.residency import roomy
from sar.storage.edge_type_names import types_of
from sar.storage.feature_files import FeatureFiles
from sar.storage.partition_json import IdRanges
from sar.storage.stored_tensor import load
from sar.storage.visible_edges import VisibleEdges


class ShardFields:
    """The edges of a partition with their fields, to be cut into shards.

    Args:
        edges: in visible order.
        edge_ranges: of global IDs, by partition and type.
        device: where they go.
    """

    def __init__(self, edges: VisibleEdges, edge_ranges: IdRanges, device: torch.device) -> None:
        self.edges = edges
        self.device = device
        self._bounds: list[int] = edges.bounds.tolist()
        # In visible order, shard after shard; shard p has the rows [bounds[p], bounds[p + 1]).
        self._fields: dict[str, tuple[Tensor, list[int]]] = {}
        several = edge_ranges.shape[1] > 1
        self._type_of_edge = types_of(edges.edge_id, edge_ranges) if several else None
        self.add(EID, edges.edge_id)
        if self._type_of_edge is not None:
            self.add(ETYPE, self._type_of_edge)

    def add(self, name: str, values: Tensor) -> None:
        """Add a field of the edges of all types, (E, ...)."""
        self._fields[name] = values.to(self.device), self._bounds

    def add_feature(self, etype: CanonicalEtype, name: str, values: Tensor, bounds: list[int]) -> None:
        """Add a feature of an edge type; `bounds` as `rows_of` gives them."""
        key = name if self._type_of_edge is None else f"{':'.join(etype)}/{name}"
        self._fields[key] = values.to(self.device), bounds

    def rows_of(self, type_id: int) -> tuple[slice | Tensor, list[int]]:
        """The rows of an edge type, and where those of each shard begin and end."""
        if self._type_of_edge is None:
            return slice(None), self._bounds
        rows = (self._type_of_edge == type_id).nonzero().squeeze(1)
        return rows, torch.searchsorted(rows, self.edges.bounds).tolist()

    def cut(self) -> list[ShardEdgesAndFeatures]:
        """Each shard's tensors are slices: the shards of a field lie one after the other in memory."""
        src, dst = self.edges.src.to(self.device), self.edges.dst.to(self.device)
        return [
            ShardEdgesAndFeatures(
                (src[begin:end], dst[begin:end]),
                {name: values[bounds[p] : bounds[p + 1]] for name, (values, bounds) in self._fields.items()},
            )
            for p, (begin, end) in enumerate(pairwise(self._bounds))
        ]


def build_shards(
    edges: VisibleEdges, edge_types: list[CanonicalEtype], files: FeatureFiles, device: torch.device
) -> list[ShardEdgesAndFeatures]:
    """Read the edge features of a partition and cut edges and features into shards."""
    edge_ranges = files.spec.edge_ranges
    features = files.features()
    orig_ids = files.original_ids()
    fields = ShardFields(edges, edge_ranges, device)
    ids_of_all_types = torch.empty(len(edges.edge_id) if orig_ids else 0, dtype=torch.int64, device=device)
    # Original IDs come first, so that a feature of that name takes their place; those from files are filled in below.
    if orig_ids:
        fields.add(ORIG_ID, ids_of_all_types)
    elif edges.orig_edge_id is not None:
        fields.add(ORIG_ID, edges.orig_edge_id)

    for type_id, etype in enumerate(edge_types):
        ids_here = [one for one in orig_ids if one.type_id == type_id]
        features_here = [one for one in features if one.type_id == type_id]
        if not ids_here and not features_here:
            continue
        rows, bounds = fields.rows_of(type_id)
        position = _positions(edges.edge_id[rows], int(edge_ranges[files.part, type_id, 0]))
        for one in ids_here:
            ids_of_all_types[rows] = load(one.stored, device, position)
        for one in features_here:
            fields.add_feature(etype, one.name, one.load(device, position, roomy), bounds)
    return fields.cut()


def _positions(edge_id: Tensor, first: int) -> Tensor:
    """Where in `edge_id` each of the IDs `first`, `first + 1`, ... stands."""
    count = len(edge_id)
    position = torch.empty(count, dtype=torch.int32 if count < 2**31 else torch.int64)
    for chunk in pieces(count):
        position[edge_id[chunk] - first] = torch.arange(chunk.start, chunk.stop, dtype=position.dtype)
    return position
