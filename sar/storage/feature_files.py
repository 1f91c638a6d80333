"""The features of one partition in their files, and the original IDs that some partitioners leave beside them."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sar.common_tuples import ORIG_ID, SPLIT, CanonicalEtype
from sar.errors import PartitionError
from sar.storage.arrays import StoredArray
from sar.storage.dgl_files import open_tensors
from sar.storage.partition_json import REWRITE, PartitionJson, owned_counts

_KINDS = {"nodes": "node_feats", "edges": "edge_feats"}


class Feature(NamedTuple):
    """A feature of one node or edge type, still on disk; rows in the order of global IDs."""

    type_id: int
    name: str
    stored: StoredArray
    is_bool: bool = False

    def load(self, device: torch.device, position: Tensor | None, empty: Callable[..., Tensor]) -> Tensor:
        """Read it, as `StoredArray.load` does."""
        values = self.stored.load(device, position, empty=empty)
        return values.clamp_(max=1).view(torch.bool) if self.is_bool else values


@dataclass(frozen=True)
class FeatureFiles:
    """The files with what is known of a partition's nodes, or of its edges.

    spec, part: the directory and the partition.
    what: whether nodes or edges.
    type_ids: by every spelling of the types' names.
    counts: how many of each type the partition owns.
    from_dispatch: written by DGL's dispatch pipeline, whose JSON file names feature files even if there are none.
    """

    spec: PartitionJson
    part: int
    what: Literal["nodes", "edges"]
    type_ids: Mapping[str, int]
    counts: list[int]
    from_dispatch: bool

    @classmethod
    def of_nodes(cls, spec: PartitionJson, part: int, *, from_dispatch: bool = False) -> "FeatureFiles":
        type_ids = {name: type_id for type_id, name in enumerate(spec.node_types)}
        return cls(spec, part, "nodes", type_ids, owned_counts(spec.node_ranges, part), from_dispatch)

    @classmethod
    def of_edges(
        cls, spec: PartitionJson, part: int, edge_types: Sequence[CanonicalEtype], *, from_dispatch: bool = False
    ) -> "FeatureFiles":
        """The edges' types go by their canonical names and as the JSON file spells them."""
        type_ids = {name: type_id for type_id, name in enumerate(spec.edge_types)}
        type_ids |= {":".join(etype): type_id for type_id, etype in enumerate(edge_types)}
        return cls(spec, part, "edges", type_ids, owned_counts(spec.edge_ranges, part), from_dispatch)

    def features(self) -> list[Feature]:
        """Find the features.

        Raises:
            PartitionError: the file is missing or damaged, or a feature has an unknown type or a wrong number of rows.
        """
        path, tensors = self.tensors()
        return [self.feature(path, key, stored) for key, stored in tensors.items()]

    def tensors(self) -> tuple[Path, dict[str, StoredArray]]:
        """The features' file, and what it holds by key, unchecked."""
        kind = _KINDS[self.what]
        path = self.spec.files[self.part].get(kind)
        if path is None:
            return self.spec.path, {}
        if self.from_dispatch and not any(os.path.exists(files[kind]) for files in self.spec.files if kind in files):
            return path, {}
        return path, open_tensors(path)

    def feature(self, path: Path, key: str, stored: StoredArray) -> Feature:
        """The feature that a file has under `type/name`, or `name` where there is one type.

        Raises:
            PartitionError: it has an unknown type or a wrong number of rows.
        """
        type_name, slash, name = key.partition("/")
        return self._checked(path, key, type_name if slash else None, name if slash else key, stored)

    def original_ids(self) -> list[Feature]:
        """Find the IDs in the input graph, one feature for each type; none where the directory lacks them.

        Raises:
            PartitionError: the file is damaged, or has not exactly one ID for every node or edge.
        """
        path = self.spec.files[self.part].get(self.what)
        if path is None or not os.path.exists(path):
            return []
        found = [self._checked(path, name, name, ORIG_ID, stored) for name, stored in open_tensors(path).items()]
        missing = {type_id for type_id, count in enumerate(self.counts) if count} - {one.type_id for one in found}
        if missing:
            raise PartitionError(
                f"{path} has IDs for {len(found)} of {len(self.counts)} types of {self.what}. {REWRITE}"
            )
        return sorted(found, key=lambda one: one.type_id)

    def _checked(self, path: Path, key: str, type_name: str | None, name: str, stored: StoredArray) -> Feature:
        """The feature, of a known type and with a row for each; without a type name it belongs to the only type."""
        only = 0 if len(self.counts) == 1 else None
        type_id = only if type_name is None else self.type_ids.get(type_name)
        if type_id is None:
            raise PartitionError(f"{path} has {key!r}; expected the types {', '.join(self.type_ids)}. {REWRITE}")
        if stored.shape[:1] != (self.counts[type_id],):
            raise PartitionError(
                f"{key!r} in {path} has shape {tuple(stored.shape)}; expected {self.counts[type_id]} rows, as many as "
                f"the partition has {self.what} of this type. {REWRITE}"
            )
        is_bool = stored.dtype == np.uint8 and (name in SPLIT or key in self.spec.bool_fields)
        return Feature(type_id, name, stored, is_bool)
