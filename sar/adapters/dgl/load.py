"""`load_dgl_partition_data`: the loader of `sar/data/load.py` with DGL's partition book, if DGL is installed."""

from collections.abc import Sequence
from typing import Any

import torch

from sar.adapters.dgl.shim import require_dgl
from sar.common_tuples import PartitionData, StrPath
from sar.data.load import load_partition
from sar.data.partition_json import PartitionJson
from sar.errors import DglError


def load_dgl_partition_data(
    partition_json_file: StrPath,
    own_partition_idx: int,
    device: str | torch.device,
    *,
    parts: Sequence[int] | None = None,
    verify: bool = True,
) -> PartitionData:
    """Load this worker's partition of a directory written by sar, `dgl.distributed.partition_graph` or DGL's pipeline.

    The number of workers may differ from the number of partitions; then all workers call this together. With more
    partitions than workers, each worker loads a consecutive range with about the same number of edges. With fewer,
    the workers that share a partition split its nodes into ranges with about the same number of nodes and edges.

    Features keep their dtype on disk. DGL stores bool as uint8; sar restores bool for `train_mask`, `val_mask` and
    `test_mask`, and for every bool field of a directory that sar wrote.
    Peak memory is 1.5 times the result plus `graph.dgl`, or twice the result for several partitions.

    Args:
        partition_json_file: the partition directory, or its JSON file.
        own_partition_idx: this worker's rank, `sar.rank()`. Before `sar.initialize_comms`: the partition to load.
        device: device of edges and features.
        parts: the partitions to load, instead of a consecutive range. Each belongs to exactly one worker. If they are
            not consecutive, global IDs follow the order of the workers and differ from DGL's.
        verify: compare files with the checksums that `sar partition` and `partition_graph` write, before they are read.
            Directories without checksums are accepted.

    Returns:
        The nodes, in-edges and features. `orig_id` is counted per type. `partition_book` is DGL's, or None if DGL
        cannot be imported or the IDs differ from DGL's. sar itself does not use it.

    Raises:
        PartitionError: a file is missing, damaged or truncated, lies outside the directory or has changed;
            `own_partition_idx` or `parts` are invalid; or the directory was written by DGL before 1.0, without a halo,
            or for GraphBolt only. The other workers get a `PeerError` from their next distributed call.
    """
    return load_partition(
        partition_json_file,
        own_partition_idx,
        device,
        parts=parts,
        verify=verify,
        make_book=_partition_book,
    )


def _partition_book(spec: PartitionJson, part: int) -> Any:
    """DGL's partition book; None if DGL is not installed."""
    try:
        require_dgl()
    except DglError:
        return None
    from dgl.distributed.graph_partition_book import RangePartitionBook

    return RangePartitionBook(
        part,
        spec.num_parts,
        {name: spec.node_ranges[:, i] for i, name in enumerate(spec.node_types)},
        {name: spec.edge_ranges[:, i] for i, name in enumerate(spec.edge_types)},
        {name: i for i, name in enumerate(spec.node_types)},
        {name: i for i, name in enumerate(spec.edge_types)},
    )
