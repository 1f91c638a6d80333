"""Read one partition of a directory that DGL's partitioners wrote, with features streamed from disk."""

import os
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sar import comm
from sar.adapters.dgl.reader.edge_type_names import canonical_edge_types, types_of
from sar.adapters.dgl.reader.feature_files import FeatureFiles
from sar.adapters.dgl.reader.local_graph import DST, PART_ID, LocalGraph, PartFile
from sar.adapters.dgl.reader.partition_json import REWRITE, PartitionJson, find_partition_json, read_partition_json
from sar.adapters.dgl.reader.shards import build_shards
from sar.adapters.dgl.reader.stored_tensor import load
from sar.adapters.dgl.reader.visible_edges import has_all_edges, order_edges
from sar.adapters.dgl.shim import require_dgl
from sar.comm.session import current_group
from sar.common_tuples import NID, NTYPE, ORIG_ID, CanonicalEtype, PartitionData
from sar.errors import DglError, PartitionError

DISPATCH_JSON = "metadata.json"


def load_dgl_partition_data(
    partition_json_file: str | PathLike[str],
    own_partition_idx: int,
    device: str | torch.device,
    *,
    allow_outside: bool = False,
) -> PartitionData:
    """Load one partition of a directory written by `dgl.distributed.partition_graph` or DGL's dispatch pipeline.

    Features keep the dtype on disk, which is uint8 for bool. Memory peaks at 1.5 times the result plus `graph.dgl`.

    Args:
        partition_json_file: the directory, or its JSON file, which names the other files relative to itself.
        own_partition_idx: the partition to load; worker r owns partition r, so pass `sar.rank()`.
        device: where edges and features go.
        allow_outside: whether the JSON file, or links beside it, may lead to files outside of its directory.

    Returns:
        The partition's nodes, in-edges and features. `orig_id` counts within types. `partition_book` is None where DGL
        cannot be imported; nothing else needs it.

    Raises:
        PartitionError: a file is missing, damaged, truncated or outside; the directory does not fit the number of
            workers; or it was written without reshuffling, without halo, or for GraphBolt only. The other workers get a
            `PeerError` from their next distributed call.
    """
    with current_group().guard() if comm.is_initialized() else nullcontext():
        spec = read_partition_json(find_partition_json(partition_json_file), allow_outside=allow_outside)
        return _load(spec, own_partition_idx, torch.device(device))


def _load(spec: PartitionJson, part: int, device: torch.device) -> PartitionData:
    _check_part(spec, part)
    file = PartFile(graph_path(spec, part))
    graph = file.read()
    from_dispatch = PART_ID not in file.nodes and spec.path.name == DISPATCH_JSON
    edge_types = canonical_edge_types(spec, graph, part)
    node_features = _node_features(spec, part, graph, from_dispatch, device)
    _check_edge_ids(spec, part, graph)
    edges = order_edges(graph, spec.partition_ranges, part)
    del graph
    edge_files = FeatureFiles.of_edges(spec, part, edge_types, from_dispatch=from_dispatch)
    return PartitionData(
        all_shard_edges=build_shards(edges, edge_types, edge_files, device),
        node_ranges=spec.partition_ranges,
        node_features=node_features,
        node_type_names=spec.node_types,
        edge_type_names=edge_types,
        partition_book=_partition_book(spec, part, edge_types),
    )


def _check_part(spec: PartitionJson, part: int) -> None:
    if isinstance(part, bool) or not isinstance(part, int) or not 0 <= part < spec.num_parts:
        raise PartitionError(
            f"own_partition_idx is {part!r}; expected a number from 0 to {spec.num_parts - 1}, as {spec.path} has "
            f"{spec.num_parts} partitions. Start as many workers as there are partitions."
        )
    if comm.is_initialized() and comm.world_size() != spec.num_parts:
        raise PartitionError(
            f"{spec.path} has {spec.num_parts} partitions, but {comm.world_size()} workers are running; expected one "
            f"worker for each partition. Start {spec.num_parts} workers, or partition into {comm.world_size()}."
        )


def graph_path(spec: PartitionJson, part: int) -> Path:
    """The partition's `graph.dgl`."""
    files = spec.files[part]
    path = files.get("part_graph")
    if path is not None and os.path.exists(path):
        return path
    if "part_graph_graphbolt" in files or (
        path is not None and os.path.exists(path.parent / "fused_csc_sampling_graph.pt")
    ):
        raise PartitionError(
            f"Partition {part} of {spec.path} is there for GraphBolt only (fused_csc_sampling_graph.pt, converted by "
            "dgl.distributed.dgl_partition_to_graphbolt); expected graph.dgl. Put back the graph.dgl from before the "
            "conversion, or partition again with use_graphbolt=False."
        )
    raise PartitionError(
        f"Partition {part} of {spec.path} lacks its graph ({path or 'part_graph is not named'}). Copy the folder of "
        "this partition to this machine, or partition again."
    )


def _node_features(
    spec: PartitionJson, part: int, graph: LocalGraph, from_dispatch: bool, device: torch.device
) -> dict[str, Tensor]:
    """Features of the partition's own nodes, in the order of their global IDs."""
    node_id, order = graph.node_id[graph.is_inner].sort()
    _check_node_ids(spec, part, graph, node_id)
    features = {NID: node_id.to(device), NTYPE: types_of(node_id, spec.node_ranges).to(device)}
    files = FeatureFiles.of_nodes(spec, part, from_dispatch=from_dispatch)
    orig_ids = [load(one.stored, device) for one in files.original_ids()]
    if orig_ids:
        features[ORIG_ID] = torch.cat(orig_ids)
    elif graph.orig_node_id is not None:
        features[ORIG_ID] = graph.orig_node_id[graph.is_inner][order].to(device)
    for one in files.features():
        features[f"{spec.node_types[one.type_id]}/{one.name}"] = load(one.stored, device)
    return features


def _check_node_ids(spec: PartitionJson, part: int, graph: LocalGraph, own: Tensor) -> None:
    path = spec.files[part]["part_graph"]
    start, end = spec.partition_ranges[part]
    if len(own) != end - start or not torch.equal(own, torch.arange(start, end)):
        raise PartitionError(
            f"{path} holds {len(own)} nodes of partition {part}; expected one for every node ID in [{start}, {end}), "
            f"as {spec.path.name} says. {REWRITE}"
        )
    num_nodes = spec.partition_ranges[-1][1]
    if not bool(((graph.node_id >= 0) & (graph.node_id < num_nodes)).all()):
        raise PartitionError(f"{path} has node IDs outside [0, {num_nodes}), the nodes of {spec.path.name}. {REWRITE}")


def _check_edge_ids(spec: PartitionJson, part: int, graph: LocalGraph) -> None:
    start, end = int(spec.edge_ranges[part, 0, 0]), int(spec.edge_ranges[part, -1, 1])
    if not has_all_edges(graph, start, end):
        found = int(graph.is_inner[graph.edges[DST].long()].sum())
        raise PartitionError(
            f"{spec.files[part]['part_graph']} holds {found} edges into the nodes of partition {part}; expected "
            f"one for every edge ID in [{start}, {end}), as {spec.path.name} says. {spec.edge_fix}"
        )


def _partition_book(spec: PartitionJson, part: int, edge_types: list[CanonicalEtype]) -> Any:
    """DGL's own, where DGL is there."""
    try:
        require_dgl()
    except DglError:
        return None
    from dgl.distributed.graph_partition_book import RangePartitionBook

    return RangePartitionBook(
        part,
        spec.num_parts,
        {name: spec.node_ranges[:, i] for i, name in enumerate(spec.node_types)},
        {name: spec.edge_ranges[:, i] for i, name in enumerate(edge_types)},
        {name: i for i, name in enumerate(spec.node_types)},
        {name: i for i, name in enumerate(edge_types)},
    )
