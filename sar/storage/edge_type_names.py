"""Canonical names for edge types, also where DGL up to 0.9 wrote their plain names only."""

import os

import numpy as np
import torch

from sar.common_tuples import EID, CanonicalEtype
from sar.errors import PartitionError
from sar.logging_setup import logger
from sar.storage.local_graph import DST, SRC, LocalGraph, PartFile
from sar.storage.partition_json import REWRITE, IdRanges, PartitionJson


def canonical_edge_types(spec: PartitionJson, graph: LocalGraph, part: int) -> list[CanonicalEtype]:
    """Name the edge types as (source type, relation, destination type).

    Plain names get their node types from an edge of that type, in this partition if it has one, else in the others.

    Raises:
        PartitionError: no file at hand has an edge of some type, or the JSON file lacks the node types that one names.
    """
    names = {type_id: split_edge_type(name) for type_id, name in enumerate(spec.edge_types)}
    if len(spec.node_types) == 1:
        (only,) = spec.node_types
        names = {type_id: name or (only, spec.edge_types[type_id], only) for type_id, name in names.items()}
    if None in names.values():
        _complete(names, spec, graph)
    for other in range(spec.num_parts):
        path = spec.files[other].get("part_graph")
        if None in names.values() and other != part and path is not None and os.path.exists(path):
            logger.info("%s gives edge types plain names; looking for their node types in %s", spec.path, path)
            _complete(names, spec, PartFile(path).read())
    nameless = [spec.edge_types[type_id] for type_id, name in names.items() if name is None]
    if nameless:
        raise PartitionError(
            f"{spec.path}: cannot tell the node types of the edge types {nameless}, as no edge of them was found; "
            "expected canonical names. Rename them to source:relation:destination under etypes and edge_map."
        )
    found = [name for name in names.values() if name is not None]
    if len(set(found)) < len(found) or not {end for src, _, dst in found for end in (src, dst)} <= {*spec.node_types}:
        raise PartitionError(
            f"{spec.path}: the edge types are {found}; expected each once, between the node types {spec.node_types}. "
            f"{REWRITE}"
        )
    return found


def split_edge_type(name: str) -> CanonicalEtype | None:
    """Take `src:rel:dst` apart; None for the plain name of an edge type."""
    parts = name.split(":")
    return (parts[0], parts[1], parts[2]) if len(parts) == 3 else None


def types_of(ids: torch.Tensor, ranges: IdRanges) -> torch.Tensor:
    """Type IDs (int32, as DGL stores them) of nodes or edges from their global IDs."""
    if ranges.shape[1] == 1:
        return torch.zeros(len(ids), dtype=torch.int32)
    ends = torch.from_numpy(np.ascontiguousarray(ranges[:, :, 1]).reshape(-1))
    return torch.searchsorted(ends, ids, right=True, out_int32=True).remainder_(ranges.shape[1])


def _complete(names: dict[int, CanonicalEtype | None], spec: PartitionJson, graph: LocalGraph) -> None:
    edge_types = types_of(graph.edges[EID], spec.edge_ranges)
    for type_id in [type_id for type_id, name in names.items() if name is None]:
        edges = (edge_types == type_id).nonzero()
        if len(edges):
            ends = torch.stack([graph.edges[end][edges[0]] for end in (SRC, DST)]).long()
            src_type, dst_type = types_of(graph.node_id[ends].view(-1), spec.node_ranges).tolist()
            names[type_id] = (spec.node_types[src_type], spec.edge_types[type_id], spec.node_types[dst_type])
