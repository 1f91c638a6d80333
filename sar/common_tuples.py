"""What passes between readers and the engine: the data of one partition, free of DGL.

Node and edge IDs are *global* and homogeneous: partition p owns the contiguous range `node_ranges[p]`, inside which
nodes of one type follow each other in runs.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from torch import Tensor

NTYPE: Final = "_TYPE"
ETYPE: Final = "_TYPE"
NID: Final = "_ID"
EID: Final = "_ID"
ORIG_ID: Final = "orig_id"
"""DGL's own names for type and ID fields (`dgl.NTYPE` and so on), spelled out so that the engine needs no DGL."""

SPLIT: Final = ("train_mask", "val_mask", "test_mask")
"""Node fields that say what to train, validate and test on."""

CanonicalEtype = tuple[str, str, str]


class ShardEdgesAndFeatures(NamedTuple):
    """The edges from one source partition into this worker's partition, by destination and then edge ID.

    edges: (source, destination) global node IDs, int64, (E_shard,) each.
    edge_features: `_TYPE` (index into `edge_type_names`; may be absent with one edge type), `_ID` and `orig_id` where
        known, (E_shard,) each, and the user's features. With one edge type these go by their bare name, (E_shard, ...);
        with several by `src:rel:dst/name`, with rows for the edges of that relation only.
    """

    edges: tuple[Tensor, Tensor]
    edge_features: dict[str, Tensor]


class PartitionData(NamedTuple):
    """Everything one worker knows about its partition.

    all_shard_edges: one entry per source partition, in order.
    node_ranges: the [start, end) range of global node IDs of every partition.
    node_features: features of this worker's nodes under `ntype/name`, (N_i of that type, ...), plus `_TYPE`, (N_i,)
        (may be absent with one node type) and `_ID` and `orig_id` where known.
    node_type_names: node types; `_TYPE` holds indices into this list.
    edge_type_names: canonical edge types (source type, relation, destination type).
    partition_book: DGL's partition book, or None for data made in memory or where DGL is not installed.
    directory: digest of the description of the directory that it is from, which workers compare; empty for data made in
        memory.
    part_ranges: the [start, end) range of global node IDs of each partition, or piece of one, that this worker has;
        empty where there is one, with all of the worker's nodes.
    """

    all_shard_edges: list[ShardEdgesAndFeatures]
    node_ranges: list[tuple[int, int]]
    node_features: dict[str, Tensor]
    node_type_names: list[str]
    edge_type_names: list[CanonicalEtype]
    partition_book: Any = None
    directory: str = ""
    part_ranges: Sequence[tuple[int, int]] = ()
