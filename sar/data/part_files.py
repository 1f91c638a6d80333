"""Reads the files of one partition: its graph, the names of its edge types, its features and original IDs.

The graph is homogeneous, with own nodes and halo, and local node numbers. sar sorts edges by source partition, then
destination, then edge ID: the visible order.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from sar.common_tuples import EID, ETYPE, NID, NTYPE, ORIG_ID, SPLIT
from sar.data.arrays import Array, StoredArray
from sar.data.graph_files import StoredGraph, open_graph_file
from sar.data.partition_json import DISPATCH_JSON, REWRITE, IdRanges, PartitionJson, What, graph_path, owned_counts
from sar.data.tensor_files import open_tensors
from sar.errors import PartitionError
from sar.tensors.id_arrays import is_permutation

if TYPE_CHECKING:
    import torch

SRC: Final = "src"
DST: Final = "dst"
INNER_NODE: Final = "inner_node"
INNER_EDGE: Final = "inner_edge"
PART_ID: Final = "part_id"
NODE_FIELDS: Final = {NID: np.int64, NTYPE: np.int32, PART_ID: np.int64, INNER_NODE: np.uint8}
EDGE_FIELDS: Final = {EID: np.int64, ETYPE: np.int32, INNER_EDGE: np.uint8}
"""The fields of a graph that sar writes."""


@dataclass
class LocalGraph:
    """The graph of one partition, reduced to the data that readers need."""

    node_id: Array  # (N,) int64: global IDs of the partition's nodes and halo
    is_inner: Array  # (N,) bool: whether the partition owns the node
    edges: dict[str, Array]  # (E,) each: `src`, `dst` (local nodes), `_ID` (global, int64)

    @cached_property
    def owned(self) -> slice | Array:
        """The edges into own nodes; a slice if they come first, as in files written by DGL."""
        inner = self.is_inner[self.edges[DST]]
        count = np.count_nonzero(inner)
        return slice(count) if inner[:count].all() else inner.nonzero()[0]


class PartFile:
    """An open `graph.dgl` whose values are read later; `PartitionError` if it is missing, damaged or another file.

    nodes, edges: DGL's internal fields, one integer per node or edge.
    """

    def __init__(self, path: Path) -> None:
        graph = open_graph_file(path)
        if len(graph.num_nodes) != 1 or len(graph.relations) != 1:
            raise _no_partition(graph, f"{len(graph.num_nodes)} types of nodes and {len(graph.relations)} of edges")
        [self._relation], [nodes] = graph.relations, graph.fields.values()
        edges = self._relation.fields
        if NID not in nodes or EID not in edges or INNER_NODE not in nodes:
            raise _no_partition(graph, f"the node fields {sorted(nodes)} and edge fields {sorted(edges)}")
        self.nodes = {key: nodes[key] for key in (NID, NTYPE, INNER_NODE, PART_ID) if key in nodes}
        self.edges = {key: edges[key] for key in (EID, ETYPE, INNER_EDGE) if key in edges}
        for name, stored in (*self.nodes.items(), *self.edges.items()):
            if len(stored.shape) != 1 or stored.dtype.kind not in "iu":
                raise PartitionError(
                    f"{path} has {name} of {stored.dtype_name} and shape {stored.shape}; expected one whole number "
                    f"for each node or edge. {REWRITE}"
                )

    def read(self) -> LocalGraph:
        src, dst = self._relation.edges.ends()
        return LocalGraph(
            node_id=self.nodes[NID][:].astype(np.int64, copy=False),
            is_inner=self.nodes[INNER_NODE][:].astype(np.bool_, copy=False),
            edges={SRC: src, DST: dst, EID: self.edges[EID][:].astype(np.int64, copy=False)},
        )


def _no_partition(graph: StoredGraph, found: str) -> PartitionError:
    return PartitionError(
        f"{graph.path} has {found}; expected a graph of one type, with at least {NID} and {INNER_NODE} on nodes, {EID} "
        "on edges. It is not the graph of a partition: check the JSON file's paths."
    )


def read_part_graph(spec: PartitionJson, part: int) -> LocalGraph:
    """Read the graph of a partition; `PartitionError` if its nodes or edges do not match the JSON file."""
    path = graph_path(spec, part)
    graph = PartFile(path).read()
    own = graph.node_id[graph.is_inner]
    start, end = spec.partition_ranges[part]
    if not is_permutation(own, start, end):
        raise PartitionError(
            f"{path} holds {len(own)} nodes of partition {part}; expected one for every node ID in [{start}, {end}), "
            f"as {spec.path.name} says. {REWRITE}"
        )
    num_nodes = spec.partition_ranges[-1][1]
    if not ((graph.node_id >= 0) & (graph.node_id < num_nodes)).all():
        raise PartitionError(f"{path} has node IDs outside [0, {num_nodes}), the nodes of {spec.path.name}. {REWRITE}")
    start, end = int(spec.edge_ranges[part, 0, 0]), int(spec.edge_ranges[part, -1, 1])
    if not is_permutation(graph.edges[EID][graph.owned], start, end):
        found = np.count_nonzero(graph.is_inner[graph.edges[DST]])
        raise PartitionError(
            f"{path} holds {found} edges into the nodes of partition {part}; expected one for every edge ID in "
            f"[{start}, {end}), as {spec.path.name} says. {spec.edge_fix}"
        )
    return graph


def types_of(ids: Array, ranges: IdRanges) -> Array:
    """Type IDs (int32, as DGL stores them) of nodes or edges from their global IDs."""
    if ranges.shape[1] == 1:
        return np.zeros(len(ids), np.int32)
    types = np.searchsorted(ranges[:, :, 1].reshape(-1), ids, side="right").astype(np.int32)
    types %= ranges.shape[1]
    return types


class Feature(NamedTuple):
    """A feature of one node or edge type, still on disk; rows in the order of global IDs."""

    type_id: int
    name: str
    stored: StoredArray
    is_bool: bool = False

    def load(
        self, device: torch.device, position: torch.Tensor | None, empty: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        import torch

        values = self.stored.load(device, position, empty=empty)
        return values.clamp_(max=1).view(torch.bool) if self.is_bool else values


class FeatureFiles:
    """The files with the features and original IDs of a partition's nodes, or of its edges."""

    def __init__(self, spec: PartitionJson, part: int, what: What) -> None:
        names, ranges = spec.types(what)
        self.spec, self.part, self.what = spec, part, what
        self.type_ids = {name: type_id for type_id, name in enumerate(names)}
        self.counts = owned_counts(ranges, part)  # by type

    def features(self) -> list[Feature]:
        """All features; `PartitionError` if the file is missing or damaged, and as in `feature`."""
        kind = "node_feats" if self.what == "nodes" else "edge_feats"
        path = self.spec.files[self.part].get(kind)
        if path is None:
            return []
        paths = [files[kind] for files in self.spec.files if kind in files]
        if self.spec.path.name == DISPATCH_JSON and not any(map(os.path.exists, paths)):
            return []  # DGL's dispatch pipeline names files that do not exist
        return [self.feature(path, key, stored) for key, stored in open_tensors(path).items()]

    def feature(self, path: Path, key: str, stored: StoredArray) -> Feature:
        """The feature under `type/name`, or `name` if there is one type; `PartitionError` if it does not fit."""
        type_name, slash, name = key.partition("/")
        if slash:
            type_id = self.type_ids.get(type_name)
        else:
            type_id, name = 0 if len(self.counts) == 1 else None, key
        if type_id is None:
            raise PartitionError(f"{path} has {key!r}; expected the types {', '.join(self.type_ids)}. {REWRITE}")
        if stored.shape[:1] != (self.counts[type_id],):
            raise PartitionError(
                f"{key!r} in {path} has shape {tuple(stored.shape)}; expected {self.counts[type_id]} rows, one "
                f"for each of the partition's {self.what} of this type. {REWRITE}"
            )
        is_bool = stored.dtype == np.uint8 and (name in SPLIT or key in self.spec.bool_fields)
        return Feature(type_id, name, stored, is_bool)

    def original_ids(self) -> list[Feature]:
        """The original IDs, one feature per type, if any; `PartitionError` if some types lack them."""
        path = self.spec.files[self.part].get(self.what)
        if path is None or not os.path.exists(path):
            return []
        found = [self.feature(path, f"{name}/{ORIG_ID}", stored) for name, stored in open_tensors(path).items()]
        for one in found:
            if one.stored.dtype.kind not in "iu":
                raise PartitionError(f"{path} has IDs in {one.stored.dtype_name}; expected whole numbers. {REWRITE}")
        missing = {type_id for type_id, count in enumerate(self.counts) if count} - {one.type_id for one in found}
        if missing:
            raise PartitionError(
                f"{path} has IDs for {len(found)} of {len(self.counts)} types of {self.what}. {REWRITE}"
            )
        return sorted(found, key=lambda one: one.type_id)
