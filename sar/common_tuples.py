"""The data of one partition, which readers pass to the engine, and lookup of its features. Does not import DGL.

Node and edge IDs are *global* and homogeneous: partition p owns the contiguous range `node_ranges[p]`, in which
nodes of one type form consecutive runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, NamedTuple, overload

from sar.errors import FieldError

if TYPE_CHECKING:
    from torch import Tensor

NTYPE: Final = "_TYPE"
ETYPE: Final = "_TYPE"
NID: Final = "_ID"
EID: Final = "_ID"
ORIG_ID: Final = "orig_id"
"""DGL's own names for type and ID fields (`dgl.NTYPE` and so on), spelled out so that the engine needs no DGL."""

GIVEN_ID: Final = "id"
"""Node field with the input's IDs, if they are strings or have gaps: (N,) int64, or UTF-8 strings, (N, L) uint8, padded
with zeros."""

SPLIT: Final = ("train_mask", "val_mask", "test_mask")
"""Node fields with training, validation and test nodes."""

CanonicalEtype = tuple[str, str, str]
AnyEtype = str | CanonicalEtype | None
"""An edge type by its canonical or its plain name; None for the only one."""

StrPath = str | PathLike[str]


class ShardEdgesAndFeatures(NamedTuple):
    """The edges from one source partition into this worker's partition, sorted by destination and then edge ID.

    edges: (source, destination) global node IDs, int64, (E_shard,) each.
    edge_features: `_TYPE` (index into `edge_type_names`; optional with one edge type), `_ID` and `orig_id` if known,
        (E_shard,) each, and the user's features. With one edge type keys are `name`, (E_shard, ...); with several,
        `src:rel:dst/name`, and rows are the edges of that relation only.
    """

    edges: tuple[Tensor, Tensor]
    edge_features: dict[str, Tensor]


class PartitionData(NamedTuple):
    """The nodes, in-edges and features of one worker's partition. `data["feat"]` is a node feature.

    If several node types have a feature, the key includes the type: `data["paper/feat"]`. The type checker mypy
    rejects strings as indices of a tuple; `suffix_key_lookup(data.node_features, "feat")` is equivalent.

    all_shard_edges: one entry per source partition, in order.
    node_ranges: the [start, end) range of global node IDs of every partition.
    node_features: features of this worker's nodes by `ntype/name`, (N_i of that type, ...), plus `_TYPE`, (N_i,)
        (optional with one node type), and `_ID` and `orig_id` if known.
    node_type_names: node types; `_TYPE` holds indices into this list.
    edge_type_names: canonical edge types (source type, relation, destination type).
    partition_book: DGL's partition book, or None for data created in memory or without DGL.
    directory: digest of the partition directory's description, which workers compare; empty for data created in memory.
    part_ranges: the [start, end) range of global node IDs of each partition, or piece of a partition, on this worker;
        empty if a single range covers all of the worker's nodes.
    """

    all_shard_edges: list[ShardEdgesAndFeatures]
    node_ranges: list[tuple[int, int]]
    node_features: dict[str, Tensor]
    node_type_names: list[str]
    edge_type_names: list[CanonicalEtype]
    partition_book: Any = None
    directory: str = ""
    part_ranges: Sequence[tuple[int, int]] = ()

    @overload
    def __getitem__(self, key: str) -> Tensor: ...
    @overload
    def __getitem__(self, key: Any) -> Any: ...
    def __getitem__(self, key: Any) -> Any:
        return suffix_key_lookup(self.node_features, key) if isinstance(key, str) else tuple.__getitem__(self, key)

    def __repr__(self) -> str:
        """The shapes of tensors, one line per type."""
        edges = sum(len(shard.edges[0]) for shard in self.all_shard_edges)
        nodes = ", ".join(f"{name} {list(values.shape)} {values.dtype}" for name, values in self.node_features.items())
        return (
            f"PartitionData({sum(end - begin for begin, end in self.node_ranges):,} nodes in {len(self.node_ranges)} "
            f"partitions, {edges:,} edges here\n  node types {self.node_type_names}, edge types "
            f"{self.edge_type_names}\n  node features {nodes})"
        )

    def __contains__(self, key: object) -> bool:
        """Whether any node type has a feature of this name."""
        return isinstance(key, str) and any(f"/{name}".endswith(f"/{key}") for name in self.node_features)


def suffix_key_lookup(
    feature_dict: Mapping[str, Tensor],
    key: str,
    expand_to_all: bool = False,
    type_list: Sequence[str | CanonicalEtype] | None = None,
) -> Tensor:
    """Look up a feature by name, without its type.

    `feat` matches `paper/feat` and `feat`, never `paper/my_feat`. An exact match is returned first.

    Args:
        feature_dict: `PartitionData.node_features`, or the `edge_features` of a shard.
        key: name of the feature, with or without its type.
        expand_to_all: return a row for every node (or edge), with zeros for types without the feature. Default False.
        type_list: `node_type_names` (`edge_type_names`) of the `PartitionData`; required for `expand_to_all` with
            several types.

    Returns:
        The rows of one type, (N_type, ...); with `expand_to_all` the rows of all types, (N, ...), in node (edge) order.

    Raises:
        FieldError: no feature matches, or several do.
    """
    matches = [name for name in feature_dict if name.endswith(f"/{key}")]
    if key in feature_dict and (key != NTYPE or not matches):  # a user's `_TYPE` takes precedence
        matches = [key]
    if not matches:
        kinds = {name.rpartition("/")[0] for name in feature_dict} - {""}
        names = sorted(name.rpartition("/")[2] if len(kinds) == 1 else name for name in feature_dict)
        raise FieldError(f"There is no feature {key!r}; expected one of {', '.join(names)}.")
    if expand_to_all:
        return _expand(feature_dict, key, matches, type_list)
    if len(matches) > 1:
        raise FieldError(f"Several features are called {key!r}: {matches}. Name one of them with its type.")
    return feature_dict[matches[0]]


def _expand(
    feature_dict: Mapping[str, Tensor], key: str, matches: list[str], type_list: Sequence[str | CanonicalEtype] | None
) -> Tensor:
    """Merge the matches: rows in the order of `_TYPE`, zeros for types without a match."""
    first = feature_dict[matches[0]]
    types = feature_dict.get(NTYPE)
    if len(matches) == 1 and (types is None or len(first) == len(types)):
        return first
    if types is None or type_list is None:
        raise FieldError(
            f"Expanding {matches} to all types needs {NTYPE!r} among the features and type_list; found "
            f"{'no type_list' if types is not None else sorted(feature_dict)}. Pass type_list=data.node_type_names."
        )
    names = [name if isinstance(name, str) else ":".join(name) for name in type_list]
    owners = [match.partition("/")[0] for match in matches]
    if len(set(owners)) < len(owners) or not set(owners) <= set(names):
        raise FieldError(f"{key!r} matches {matches}; expected one feature at most of each of the types {names}.")
    result = first.new_zeros((len(types), *first.shape[1:]))
    for match, owner in zip(matches, owners, strict=True):
        feature, rows = feature_dict[match], types == names.index(owner)
        if feature.dtype != first.dtype or feature.shape != (int(rows.sum()), *first.shape[1:]):
            raise FieldError(
                f"{match!r} has shape {tuple(feature.shape)} and dtype {feature.dtype}; expected {int(rows.sum())} "
                f"rows of shape {tuple(first.shape[1:])} and dtype {first.dtype}, as {matches[0]!r} has them."
            )
        result[rows] = feature
    return result
