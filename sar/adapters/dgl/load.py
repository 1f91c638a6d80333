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
        device: device of edges and features.
        parts: the partitions of this worker, if any, in place of consecutive ones; each is with one worker. If they
            are not consecutive, global IDs count through the workers' partitions in their order, other than DGL's own.
        verify: compare files with the checksums that `sar partition` and `partition_graph` leave beside them, before
            they are read. Directories without checksums are taken as they are.

    Returns:
        The nodes, in-edges and features. `orig_id` counts within types. `partition_book` is that of DGL's partitions;
        None if DGL cannot be imported or IDs are not its own. Nothing else needs it.

    Raises:
        PartitionError: a file is missing, damaged, truncated, outside or not what was written; `own_partition_idx` or
            `parts` do not fit; or the directory was written by DGL before 1.0, without halo, or for GraphBolt only.
            The other workers get a `PeerError` from their next distributed call.
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
