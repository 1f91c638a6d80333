"""Loads a worker's share of a partition directory, streaming features from disk."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from sar.comm import session
from sar.comm.group import Group
from sar.comm.session import current_group
from sar.common_tuples import (
    EID,
    ETYPE,
    NID,
    NTYPE,
    ORIG_ID,
    CanonicalEtype,
    PartitionData,
    ShardEdgesAndFeatures,
    StrPath,
)
from sar.data.checksums import check_sums
from sar.data.part_files import FeatureFiles, LocalGraph, read_part_graph, types_of
from sar.data.partition_json import IdRanges, PartitionJson, graph_path, read_partition_json
from sar.data.regroup import VisibleEdges, WorkerShare, cut_shards, order_edges, regroup, renumber
from sar.errors import PartitionError
from sar.logging_setup import logger
from sar.tensors.spillable import empty_spillable

MakeBook = Callable[[PartitionJson, int], Any]


def load_partition(
    partition_json_file: StrPath,
    own_partition_idx: int,
    device: str | torch.device,
    *,
    parts: Sequence[int] | None,
    verify: bool,
    make_book: MakeBook,
) -> PartitionData:
    """Load a worker's share of a partition directory; arguments and errors as in `sar.load_dgl_partition_data`.

    Args:
        make_book: creates DGL's partition book from the directory and the partition.
    """
    device = torch.device(device)
    with current_group().guard() if session.is_initialized() else nullcontext():
        spec = read_partition_json(partition_json_file)
        workers = session.world_size() if session.is_initialized() else spec.num_parts
        if type(own_partition_idx) is not int or not 0 <= own_partition_idx < workers:
            raise PartitionError(
                f"own_partition_idx is {own_partition_idx!r}; expected a number from 0 to {workers - 1}, sar.rank()."
            )
        logger.info("loading the share of worker %d of %d in %s", own_partition_idx, workers, spec.path)
        if parts is None and workers == spec.num_parts:
            data = _load_part(spec, own_partition_idx, device, verify, make_book)
        else:
            data = on_device(_load_share(spec, own_partition_idx, parts, verify, make_book), device)
        if session.is_initialized():
            edges = sum(len(shard.edges[0]) for shard in data.all_shard_edges)
            current_group().own_sizes.update([edges, *map(len, data.node_features.values())])
        return data


def _load_share(
    spec: PartitionJson, worker: int, parts: Sequence[int] | None, verify: bool, make_book: MakeBook
) -> PartitionData:
    """Load a worker's share if the numbers of workers and partitions differ."""
    if not session.is_initialized():
        raise PartitionError("parts are chosen together by all workers; call sar.initialize_comms() first.")
    group = current_group()
    if worker != group.rank:
        raise PartitionError(
            f"own_partition_idx is {worker}, but this is worker {group.rank}; with {spec.num_parts} partitions for "
            f"{group.world_size} workers expected sar.rank(). Choose partitions by `parts`."
        )
    group.agree(f"loading {spec.num_parts} partitions, {'chosen' if parts is not None else 'dealt'}")
    graphs: dict[int, LocalGraph] = {}
    if parts is None:
        order, share = list(range(spec.num_parts)), WorkerShare.of(spec, worker, group.world_size, graphs)
    else:
        order, share = _chosen_share(spec, parts, group)
    node_ranges = [(start, end) for start, end in group.gather_numbers([share.start, share.end], "node ranges")]
    loaded = {}
    for part in share.parts:
        data = _load_part(spec, part, torch.device("cpu"), verify, make_book, graphs.pop(part, None))
        loaded[order.index(part)] = renumber(data, part, order)
    return regroup(loaded, node_ranges, worker)


def _chosen_share(spec: PartitionJson, parts: Sequence[int], group: Group) -> tuple[list[int], WorkerShare]:
    """All partitions in the order of the workers that request them, and this worker's share, in IDs of this order.

    A worker without partitions gets an empty share of the first one. A collective call.
    """
    own = torch.tensor(list(parts), dtype=torch.int64, device="cpu")
    if not bool(((own >= 0) & (own < spec.num_parts)).all()):
        raise PartitionError(f"parts is {list(parts)}; expected some of 0 to {spec.num_parts - 1}, as in {spec.path}.")
    mine = own.bincount(minlength=spec.num_parts) * (1 + group.rank)
    owners = torch.stack(group.all_gather(mine, "parts"))
    taken = (owners > 0).sum(0)
    if not bool((taken == 1).all()) or len(own) != int((mine > 0).sum()):
        raise PartitionError(
            f"The partitions 0 to {spec.num_parts - 1} are with {taken.tolist()} workers each, and this worker chose "
            f"{list(parts)}; expected each with one worker, once."
        )
    order: list[int] = owners.sum(0).argsort(stable=True).tolist()
    sizes = [spec.partition_ranges[part][1] - spec.partition_ranges[part][0] for part in order]
    bounds = list(accumulate(sizes, initial=0))
    first = int((owners.sum(0) <= group.rank).sum())  # partitions of the workers before this one
    last = first + len(own)
    return order, WorkerShare(order[first:last] or order[:1], bounds[first], bounds[last])


def on_device(data: PartitionData, device: torch.device) -> PartitionData:
    """Move all tensors of the data to a device."""
    shards = [
        ShardEdgesAndFeatures(
            (src.to(device), dst.to(device)), {name: values.to(device) for name, values in features.items()}
        )
        for (src, dst), features in data.all_shard_edges
    ]
    node_features = {name: values.to(device) for name, values in data.node_features.items()}
    return data._replace(all_shard_edges=shards, node_features=node_features)


def _load_part(
    spec: PartitionJson,
    part: int,
    device: torch.device,
    verify: bool,
    make_book: MakeBook,
    graph: LocalGraph | None = None,
) -> PartitionData:
    """Load one partition; with `verify`, compare its files with their checksums first.

    `graph` is its graph if already read; its edges are moved out of it.
    """
    if verify:
        check_sums(graph_path(spec, part).parent)
    edges = order_edges(graph or read_part_graph(spec, part), spec.partition_ranges, part)
    return PartitionData(
        all_shard_edges=_shards(edges, FeatureFiles(spec, part, "edges"), device),
        node_ranges=spec.partition_ranges,
        node_features=_node_features(FeatureFiles(spec, part, "nodes"), device),
        node_type_names=spec.node_types,
        edge_type_names=spec.edge_types,
        partition_book=make_book(spec, part),
        directory=spec.digest,
    )


def _node_features(files: FeatureFiles, device: torch.device) -> dict[str, Tensor]:
    """Features of the partition's own nodes, in the order of their global IDs."""
    spec = files.spec
    node_id = torch.arange(*spec.partition_ranges[files.part], device="cpu")
    features = {
        NID: node_id.to(device),
        NTYPE: torch.from_numpy(types_of(node_id.numpy(), spec.node_ranges)).to(device),
    }
    orig_ids = [one.stored.load(device, empty=empty_spillable) for one in files.original_ids()]
    if orig_ids:
        features[ORIG_ID] = torch.cat(orig_ids)
    for one in files.features():
        features[f"{spec.node_types[one.type_id]}/{one.name}"] = one.load(device, None, empty_spillable)
    return features


class ShardFields:
    """The edges of a partition in visible order, with fields on `device`, to be cut into shards."""

    def __init__(self, edges: VisibleEdges, edge_ranges: IdRanges, device: torch.device) -> None:
        self.edges = edges
        self.device = device
        self._bounds: list[int] = edges.bounds.tolist()
        # In visible order; shard p has the rows [bounds[p], bounds[p + 1]).
        self._fields: dict[str, tuple[Tensor, list[int]]] = {}
        several = edge_ranges.shape[1] > 1
        self._type_of_edge = torch.from_numpy(types_of(edges.edge_id.numpy(), edge_ranges)) if several else None
        self.add(EID, edges.edge_id)
        if self._type_of_edge is not None:
            self.add(ETYPE, self._type_of_edge)

    def add(self, name: str, values: Tensor) -> None:
        """Add a field of the edges of all types, (E, ...)."""
        self._fields[name] = values.to(self.device), self._bounds

    def add_feature(self, etype: CanonicalEtype, name: str, values: Tensor, bounds: list[int]) -> None:
        """Add a feature of an edge type; `bounds` are from `rows_of`."""
        key = name if self._type_of_edge is None else f"{':'.join(etype)}/{name}"
        self._fields[key] = values.to(self.device), bounds

    def rows_of(self, type_id: int) -> tuple[slice | Tensor, list[int]]:
        """The rows of an edge type, and the bounds of the shards among them."""
        if self._type_of_edge is None:
            return slice(None), self._bounds
        rows = (self._type_of_edge == type_id).nonzero().squeeze(1)
        return rows, torch.searchsorted(rows, self.edges.bounds).tolist()

    def cut(self) -> list[ShardEdgesAndFeatures]:
        """Cut edges and fields into shards with `cut_shards`."""
        src, dst = self.edges.src.to(self.device), self.edges.dst.to(self.device)
        return cut_shards(src, dst, self._bounds, self._fields)


def _shards(edges: VisibleEdges, files: FeatureFiles, device: torch.device) -> list[ShardEdgesAndFeatures]:
    """Read the edge features of a partition and cut edges and features into shards."""
    edge_types, edge_ranges = files.spec.edge_types, files.spec.edge_ranges
    features = files.features()
    orig_ids = files.original_ids()
    several = bool(orig_ids) and len(edge_types) > 1
    fields = ShardFields(edges, edge_ranges, device)
    ids_of_all_types = torch.empty(len(edges.edge_id) if several else 0, dtype=torch.int64, device=device)
    # Original IDs come first, because a feature of that name replaces them; IDs from files are filled in below.
    if several:
        fields.add(ORIG_ID, ids_of_all_types)

    for type_id, etype in enumerate(edge_types):
        ids_here = [one for one in orig_ids if one.type_id == type_id]
        features_here = [one for one in features if one.type_id == type_id]
        if not ids_here and not features_here:
            continue
        rows, bounds = fields.rows_of(type_id)
        position = edges.places  # in `rows`, of the edges in the order of their IDs
        if isinstance(rows, Tensor):
            number = torch.empty_like(position).scatter_(
                0, rows, torch.arange(len(rows), dtype=position.dtype, device="cpu")
            )
            start, end = (edge_ranges[files.part, type_id] - edge_ranges[files.part, 0, 0]).tolist()
            position = number.index_select(0, position[start:end])
        for one in ids_here:
            ids = one.stored.load(device, position).long()
            if several:
                ids_of_all_types[rows] = ids
            else:
                fields.add(ORIG_ID, ids)
        for one in features_here:
            fields.add_feature(etype, one.name, one.load(device, position, empty_spillable), bounds)
    return fields.cut()
