"""IDs in the input graph of the nodes, or of the edges, that a worker has, in the order in which it has them."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sar.common_tuples import CanonicalEtype
from sar.errors import ConfigError, PartitionError
from sar.storage.edge_type_names import canonical_edge_types, split_edge_type, types_of
from sar.storage.feature_files import FeatureFiles
from sar.storage.local_graph import PartFile, check_node_ids
from sar.storage.partition_json import IdRanges, PartitionJson, graph_path
from sar.storage.stored_tensor import load
from sar.storage.visible_edges import check_edge_ids, order_edges
from sar.storage.worker_share import WorkerShare

CPU = torch.device("cpu")
Ids = NDArray[np.int64]


class Originals(NamedTuple):
    """The nodes of a type, or the edges.

    name: what a row belongs to, for messages.
    total: how many there are on all workers.
    of_worker: from a worker's share, and one past the last global node ID of every worker, to original IDs, piece by
        piece.
    """

    name: str
    total: int
    of_worker: Callable[[WorkerShare, Sequence[int]], Iterator[Ids]]


def original_nodes(spec: PartitionJson, ntype: str | None) -> Originals:
    """The nodes of a type, which may be left out where there is one; in the order of global IDs."""
    ntype = spec.node_types[0] if ntype is None and len(spec.node_types) == 1 else ntype
    if ntype not in spec.node_types:
        raise ConfigError(f"ntype is {ntype!r}; expected one of {spec.node_types}, the node types of {spec.path}.")
    kind = spec.node_types.index(ntype)
    of_part = lru_cache(maxsize=1)(partial(_nodes_of_part, spec, kind))  # workers of one part come in turn

    def of_worker(share: WorkerShare, ends: Sequence[int]) -> Iterator[Ids]:
        for part, rows in share.rows(spec, kind).items():
            yield of_part(part)[rows]

    return Originals(f"node of type {ntype!r}", _total(spec.node_ranges[:, kind]), of_worker)


def original_edges(spec: PartitionJson, etype: str | CanonicalEtype) -> Originals:
    """The edges of a type, by its canonical or its plain name; in each worker's visible order."""
    names = [split_edge_type(name) or name for name in spec.edge_types]
    if isinstance(etype, str):
        matches = [etype == (name if isinstance(name, str) else name[1]) for name in names]
    else:
        matches = [name in (etype, etype[1]) for name in names]
    if sum(matches) != 1:
        raise ConfigError(f"etype is {etype!r}; expected one of {names}, the edge types of {spec.path}.")
    kind = matches.index(True)
    of_part = lru_cache(maxsize=1)(partial(_edges_of_part, spec, kind))

    def of_worker(share: WorkerShare, ends: Sequence[int]) -> Iterator[Ids]:
        # All parts at once: in the visible order a source's worker, which may have several, comes first.
        pieces = [of_part(part) for part in share.parts]
        src, dst, ids, originals = (torch.cat(columns).numpy() for columns in zip(*pieces, strict=True))
        order = np.lexsort((ids, dst, np.searchsorted(ends, src, side="right")))
        yield originals[order[(dst[order] >= share.start) & (dst[order] < share.end)]]

    return Originals(f"edge of type {names[kind]!r}", _total(spec.edge_ranges[:, kind]), of_worker)


def _total(ranges: IdRanges) -> int:
    return int((ranges[:, 1] - ranges[:, 0]).sum())


def _nodes_of_part(spec: PartitionJson, kind: int, part: int) -> Ids:
    """Of a part's nodes of one type, (N_i,), in the order of their global IDs."""
    stored = [one.stored for one in FeatureFiles.of_nodes(spec, part).original_ids() if one.type_id == kind]
    if stored:
        return load(stored[0], CPU).long().numpy()
    start, end = spec.node_ranges[part, kind].tolist()
    if start == end:
        return np.empty(0, np.int64)
    graph = PartFile(graph_path(spec, part)).read()
    if graph.orig_node_id is None:
        raise _no_ids(spec, part, "orig_nids.dgl")
    owned = graph.is_inner & (types_of(graph.node_id, spec.node_ranges) == kind)
    ids, order = graph.node_id[owned].sort()
    if len(ids) != end - start or not torch.equal(ids, torch.arange(start, end)):
        raise PartitionError(f"{graph_path(spec, part)} has not each of the nodes [{start}, {end}) once.")
    return graph.orig_node_id[owned][order].long().numpy()


def _edges_of_part(spec: PartitionJson, kind: int, part: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a part's edges of one type: sources, destinations, global and original IDs, (E,) each."""
    graph = PartFile(graph_path(spec, part)).read()
    check_node_ids(spec, part, graph)
    check_edge_ids(spec, part, graph)
    files = FeatureFiles.of_edges(spec, part, canonical_edge_types(spec, graph, part))
    edges = order_edges(graph, spec.partition_ranges, part)
    mine = types_of(edges.edge_id, spec.edge_ranges) == kind
    ids, originals = edges.edge_id[mine], edges.orig_edge_id
    stored = [one.stored for one in files.original_ids() if one.type_id == kind]
    if stored:
        originals = load(stored[0], CPU).long()[ids - int(spec.edge_ranges[part, kind, 0])]
    elif originals is not None:
        originals = originals[mine]
    elif len(ids):
        raise _no_ids(spec, part, "orig_eids.dgl")
    else:
        originals = ids
    return edges.src[mine], edges.dst[mine], ids, originals


def _no_ids(spec: PartitionJson, part: int, file: str) -> PartitionError:
    return PartitionError(
        f"Part {part} of {spec.path} has no original IDs: neither {file} nor orig_id in graph.dgl. Partition again "
        f"with `sar partition`, or save what partition_graph(..., return_mapping=True) returns as {file}."
    )
