"""Read one partition of a directory that DGL's partitioners wrote, with features streamed from disk."""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from sar import comm
from sar.adapters.dgl.shards import build_shards
from sar.adapters.dgl.shim import require_dgl
from sar.comm.group import Group
from sar.comm.session import current_group
from sar.common_tuples import NID, NTYPE, ORIG_ID, CanonicalEtype, PartitionData, ShardEdgesAndFeatures
from sar.core.regroup import regroup, renumber
from sar.errors import DglError, PartitionError
from sar.kernels import compile_ahead
from sar.logging_setup import logger
from sar.outofcore.residency import roomy
from sar.storage.checked_file import comparing
from sar.storage.edge_type_names import canonical_edge_types, types_of
from sar.storage.feature_files import FeatureFiles
from sar.storage.local_graph import PART_ID, LocalGraph, PartFile, check_node_ids
from sar.storage.partition_json import DISPATCH_JSON, PartitionJson, graph_path, read_partition_json
from sar.storage.stored_tensor import load
from sar.storage.visible_edges import check_edge_ids, order_edges
from sar.storage.worker_share import WorkerShare


def load_dgl_partition_data(
    partition_json_file: str | PathLike[str],
    own_partition_idx: int,
    device: str | torch.device,
    *,
    parts: Sequence[int] | None = None,
    allow_outside: bool = False,
    verify: bool = True,
) -> PartitionData:
    """Load a worker's share of a directory written by `dgl.distributed.partition_graph` or DGL's dispatch pipeline.

    There may be any number of workers. With more partitions than workers, each takes consecutive ones with about
    equally many edges; with fewer, the workers of a partition divide its nodes in runs of about equally many nodes and
    edges. Unless there are as many partitions as workers, all workers call this together.

    Features keep the dtype on disk, which is uint8 for bool in directories that DGL wrote; `train_mask`, `val_mask` and
    `test_mask` are bool again, and so are all that were in directories that sar wrote.
    Memory peaks at 1.5 times the result plus `graph.dgl`, and for several partitions at twice the result.

    Args:
        partition_json_file: the directory, or its JSON file, which names the other files relative to itself.
        own_partition_idx: this worker, `sar.rank()`. Before `sar.initialize_comms`: the partition to load.
        device: where edges and features go.
        parts: the partitions of this worker, if any, in place of consecutive ones; each is with one worker. Where they
            are not consecutive, global IDs count through the workers' partitions in their order, other than DGL's own.
        allow_outside: whether the JSON file, or links beside it, may lead to files outside of its directory.
        verify: compare what is read with the checksums that `sar partition` and `partition_graph` leave beside the
            files. Directories without checksums are taken as they are.

    Returns:
        The nodes, in-edges and features. `orig_id` counts within types. `partition_book` is that of DGL's partitions;
        None where DGL cannot be imported or IDs are not its own. Nothing else needs it.

    Raises:
        PartitionError: a file is missing, damaged, truncated, outside or not what was written; `own_partition_idx` or
            `parts` do not fit; or the directory was written without reshuffling, without halo, or for GraphBolt only.
            The other workers get a `PeerError` from their next distributed call.
    """
    device = torch.device(device)
    if device.type == "cpu":
        compile_ahead()
    with current_group().guard() if comm.is_initialized() else nullcontext():
        spec = read_partition_json(partition_json_file, allow_outside=allow_outside)
        workers = comm.world_size() if comm.is_initialized() else spec.num_parts
        if type(own_partition_idx) is not int or not 0 <= own_partition_idx < workers:
            raise PartitionError(
                f"own_partition_idx is {own_partition_idx!r}; expected a number from 0 to {workers - 1}, sar.rank()."
            )
        logger.info("loading what worker %d of %d has of %s", own_partition_idx, workers, spec.path)
        if parts is None and workers == spec.num_parts:
            return _load_part(spec, own_partition_idx, device, verify)
        return _on_device(_load_share(spec, own_partition_idx, parts, verify), device)


def _load_share(spec: PartitionJson, worker: int, parts: Sequence[int] | None, verify: bool) -> PartitionData:
    """Load what a worker has of partitions that are not one for each worker."""
    if not comm.is_initialized():
        raise PartitionError("parts are chosen together by all workers; call sar.initialize_comms() first.")
    group = current_group()
    if worker != group.rank:
        raise PartitionError(
            f"own_partition_idx is {worker}, but this is worker {group.rank}; with {spec.num_parts} partitions for "
            f"{group.world_size} workers expected sar.rank(). Choose partitions by `parts`."
        )
    group.agree(f"loading {spec.num_parts} partitions, {'chosen' if parts is not None else 'dealt'}")
    if parts is None:
        order, share = list(range(spec.num_parts)), WorkerShare.of(spec, worker, group.world_size)
    else:
        order, share = _chosen_share(spec, parts, group)
    everywhere = group.all_gather(torch.tensor([share.start, share.end]), "node ranges")
    node_ranges = [(int(start), int(end)) for start, end in everywhere]
    cpu = torch.device("cpu")
    loaded = {order.index(p): renumber(_load_part(spec, p, cpu, verify), p, order) for p in share.parts}
    return regroup(loaded, node_ranges, worker)


def _chosen_share(spec: PartitionJson, parts: Sequence[int], group: Group) -> tuple[list[int], WorkerShare]:
    """A worker's share where every worker names its partitions, if any; called by all workers together.

    Returns:
        All partitions in the order of the workers that have them, and the share, in IDs that count in this order. The
        share of a worker without partitions is no nodes of the first one.

    Raises:
        PartitionError: there is no such partition, or not each is with one worker.
    """
    own = torch.tensor(list(parts), dtype=torch.int64)
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


def _on_device(data: PartitionData, device: torch.device) -> PartitionData:
    shards = [
        ShardEdgesAndFeatures(
            (src.to(device), dst.to(device)), {name: values.to(device) for name, values in features.items()}
        )
        for (src, dst), features in data.all_shard_edges
    ]
    node_features = {name: values.to(device) for name, values in data.node_features.items()}
    return data._replace(all_shard_edges=shards, node_features=node_features)


def _load_part(spec: PartitionJson, part: int, device: torch.device, verify: bool) -> PartitionData:
    """As `_load`, and compare what is read with the part's checksums."""
    with comparing(graph_path(spec, part).parent) if verify else nullcontext():
        return _load(spec, part, device)


def _load(spec: PartitionJson, part: int, device: torch.device) -> PartitionData:
    file = PartFile(graph_path(spec, part))
    graph = file.read()
    check_node_ids(spec, part, graph)
    from_dispatch = PART_ID not in file.nodes and spec.path.name == DISPATCH_JSON
    edge_types = canonical_edge_types(spec, graph, part)
    node_features = _node_features(spec, part, graph, from_dispatch, device)
    check_edge_ids(spec, part, graph)
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
        directory=spec.digest,
    )


def _node_features(
    spec: PartitionJson, part: int, graph: LocalGraph, from_dispatch: bool, device: torch.device
) -> dict[str, Tensor]:
    """Features of the partition's own nodes, in the order of their global IDs."""
    node_id, order = graph.node_id[graph.is_inner].sort()
    features = {NID: node_id.to(device), NTYPE: types_of(node_id, spec.node_ranges).to(device)}
    files = FeatureFiles.of_nodes(spec, part, from_dispatch=from_dispatch)
    orig_ids = [load(one.stored, device, empty=roomy) for one in files.original_ids()]
    if orig_ids:
        features[ORIG_ID] = torch.cat(orig_ids)
    elif graph.orig_node_id is not None:
        features[ORIG_ID] = graph.orig_node_id[graph.is_inner][order].to(device)
    for one in files.features():
        features[f"{spec.node_types[one.type_id]}/{one.name}"] = one.load(device, None, roomy)
    return features


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
