"""Find the features of one partition in their files, and the original IDs that some partitioners leave beside them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from sar.adapters.dgl.reader.partition_json import REWRITE, PartitionJson, owned_counts
from sar.adapters.dgl.reader.tensor_file import StoredTensor, open_tensors
from sar.common_tuples import ORIG_ID, CanonicalEtype
from sar.errors import PartitionError

_FEATURES = {"nodes": "node_feats", "edges": "edge_feats"}
ORIG_ID_FILES = {"nodes": "orig_nids.dgl", "edges": "orig_eids.dgl"}


class Feature(NamedTuple):
    """A feature of one node or edge type, still on disk; rows in the order of global IDs."""

    type_id: int
    name: str
    stored: StoredTensor


class Owned(NamedTuple):
    """The nodes or the edges of one partition: type IDs by every spelling of their names, and how many of each type."""

    what: Literal["nodes", "edges"]
    type_ids: Mapping[str, int]
    counts: list[int]


def owned_nodes(spec: PartitionJson, part: int) -> Owned:
    """The nodes of a partition."""
    return Owned("nodes", {name: i for i, name in enumerate(spec.node_types)}, owned_counts(spec.node_ranges, part))


def owned_edges(spec: PartitionJson, part: int, edge_types: Sequence[CanonicalEtype]) -> Owned:
    """The edges of a partition, whose types go by their canonical names and as the JSON file spells them."""
    spellings = (spec.edge_types, [":".join(etype) for etype in edge_types])
    type_ids = {name: i for spelling in spellings for i, name in enumerate(spelling)}
    return Owned("edges", type_ids, owned_counts(spec.edge_ranges, part))


def open_features(spec: PartitionJson, part: int, owned: Owned, *, from_dispatch: bool) -> list[Feature]:
    """Find the features of a partition.

    Args:
        spec: the directory.
        part: the partition.
        owned: its nodes or its edges.
        from_dispatch: written by DGL's dispatch pipeline, whose JSON file names feature files even if there are none.

    Raises:
        PartitionError: the file is missing or damaged, or a feature has an unknown type or a wrong number of rows.
    """
    path, tensors = stored_features(spec, part, owned.what, from_dispatch=from_dispatch)
    return [as_feature(path, key, stored, owned) for key, stored in tensors.items()]


def stored_features(
    spec: PartitionJson, part: int, what: Literal["nodes", "edges"], *, from_dispatch: bool
) -> tuple[Path, dict[str, StoredTensor]]:
    """The features' file, and what it holds by key, unchecked; arguments as `open_features`."""
    kind = _FEATURES[what]
    path = spec.files[part].get(kind)
    if path is None:
        return spec.path, {}
    if from_dispatch and not any(files[kind].exists() for files in spec.files if kind in files):
        return path, {}
    return path, open_tensors(path)


def open_orig_ids(spec: PartitionJson, part: int, owned: Owned) -> list[Feature]:
    """Find the IDs in the input graph, one feature for each type; none where the directory lacks them.

    Raises:
        PartitionError: the file is damaged, or has not exactly one ID for every node or edge.
    """
    path = spec.files[part]["part_graph"].parent / ORIG_ID_FILES[owned.what]
    if not path.exists():
        return []
    features = [_feature(path, name, name, ORIG_ID, stored, owned) for name, stored in open_tensors(path).items()]
    missing = {type_id for type_id, count in enumerate(owned.counts) if count} - {one.type_id for one in features}
    if missing:
        raise PartitionError(
            f"{path} has IDs for {len(features)} of {len(owned.counts)} types of {owned.what}. {REWRITE}"
        )
    return sorted(features, key=lambda one: one.type_id)


def as_feature(path: Path, key: str, stored: StoredTensor, owned: Owned) -> Feature:
    """The feature under `type/name`, or `name` where there is one type.

    Raises:
        PartitionError: it has an unknown type or a wrong number of rows.
    """
    type_name, slash, name = key.partition("/")
    return _feature(path, key, type_name if slash else None, name if slash else key, stored, owned)


def _feature(path: Path, key: str, type_name: str | None, name: str, stored: StoredTensor, owned: Owned) -> Feature:
    """Type and name of a tensor, checked; without a type name it belongs to the only type."""
    only = 0 if len(owned.counts) == 1 else None
    type_id = only if type_name is None else owned.type_ids.get(type_name)
    if type_id is None:
        raise PartitionError(f"{path} has {key!r}; expected the types {', '.join(owned.type_ids)}. {REWRITE}")
    if stored.shape[:1] != (owned.counts[type_id],):
        raise PartitionError(
            f"{key!r} in {path} has shape {tuple(stored.shape)}; expected {owned.counts[type_id]} rows, as many as the "
            f"partition has {owned.what} of this type. {REWRITE}"
        )
    return Feature(type_id, name, stored)
