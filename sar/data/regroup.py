"""Assigns the nodes of a partitioned graph to any number of workers, and collects the data of a worker's nodes.

With one partition per worker, worker r owns partition r. With more, a worker owns consecutive partitions with about
the same number of edges. With fewer, the workers of a partition split its nodes into ranges with about equal numbers of
nodes and in-edges.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sar.common_tuples import EID, ETYPE, NID, NTYPE, PartitionData, ShardEdgesAndFeatures
from sar.data.part_files import DST, SRC, LocalGraph, read_part_graph
from sar.data.partition_json import PartitionJson
from sar.errors import PartitionError
from sar.kernels import index_dtype
from sar.tensors.ids import less_first
from sar.tensors.spillable import empty_spillable
from sar.tensors.views import as_numpy


class WorkerShare(NamedTuple):
    """A worker's nodes: those of the partitions `parts` whose global IDs are in [start, end)."""

    parts: list[int]
    start: int
    end: int

    @classmethod
    def of(cls, spec: PartitionJson, worker: int, workers: int, graphs: dict[int, LocalGraph]) -> "WorkerShare":
        """The share of one of `workers` workers. If workers share a partition, its graph is read into `graphs`."""
        if workers <= spec.num_parts:
            ranges, run = spec.partition_ranges, deal_parts(_edges(spec), workers)[worker]
            return cls([*run], ranges[run[0]][0], ranges[run[-1]][1])
        dealt = enumerate(deal_workers(_edges(spec), workers))
        part, sharing = next((part, sharing) for part, sharing in dealt if worker in sharing)
        return _divided(spec, part, len(sharing), graphs)[worker - sharing[0]]


def _edges(spec: PartitionJson) -> list[int]:
    """The number of edges into each partition."""
    return (spec.edge_ranges[..., 1] - spec.edge_ranges[..., 0]).sum(axis=1).tolist()


def _divided(spec: PartitionJson, part: int, workers: int, graphs: dict[int, LocalGraph]) -> list[WorkerShare]:
    """The shares of a partition's workers; several workers divide it by its graph, which is added to `graphs`."""
    first, end = spec.partition_ranges[part]
    if workers == 1:
        return [WorkerShare([part], first, end)]
    graphs[part] = read_part_graph(spec, part)
    runs = equal_runs(node_costs(graphs[part], (first, end)), workers)
    return [WorkerShare([part], first + start, first + end) for start, end in runs]


def node_costs(graph: LocalGraph, own: tuple[int, int]) -> Tensor:
    """The cost of each node of a partition: one, plus one per in-edge, (N_i,) int64."""
    in_degrees = np.bincount(graph.edges[DST], minlength=len(graph.node_id))
    costs = np.ones(own[1] - own[0], np.int64)
    costs[graph.node_id[graph.is_inner] - own[0]] += in_degrees[graph.is_inner]
    return torch.from_numpy(costs)


class VisibleEdges(NamedTuple):
    """In-edges of a partition's own nodes, in visible order, with global IDs, (E,) int64 each."""

    src: Tensor
    dst: Tensor
    edge_id: Tensor
    places: Tensor  # (E,) int32 or int64: positions of the edges, in the order of their IDs
    bounds: Tensor  # (num_parts + 1,) edges from partition p are [bounds[p], bounds[p + 1])


def order_edges(graph: LocalGraph, node_ranges: list[tuple[int, int]], part: int) -> VisibleEdges:
    """Sort a partition's edges and remove them from `graph`; `node_ranges`: [start, end) of each partition's nodes."""
    # Memory: every column of the graph is freed once it is sorted. If edges are in the order of their IDs, as sar
    # writes them, we hold at most 36 bytes per edge, and 28 afterwards.
    from sar.kernels.cpu.csr_view import NO_INDICES, place_edges, put  # loads the compiler

    columns, rows = graph.edges, graph.owned
    edge_id = columns[EID][rows]
    if not (edge_id[1:] > edge_id[:-1]).all():
        order = edge_id.argsort()
        rows = order if isinstance(rows, slice) else rows[order]
    for name in columns:
        columns[name] = columns[name][rows]
    del edge_id
    start, end = node_ranges[part]
    src, dst = columns[SRC], columns[DST]
    node_id = torch.from_numpy(graph.node_id)
    part_of = torch.searchsorted(
        torch.tensor([end for _, end in node_ranges], device="cpu"), node_id, right=True, out_int32=True
    )
    bounds = torch.zeros(len(node_ranges) + 1, dtype=torch.int64, device="cpu")
    places = torch.empty(len(src), dtype=index_dtype(len(src)), device="cpu")
    row_of, by_part = less_first(node_id, start), torch.empty_like(places)
    ends_of_rows = torch.empty(end - start + 1, dtype=places.dtype, device="cpu")
    place_edges(src, dst, *map(as_numpy, (part_of, row_of, bounds, ends_of_rows, by_part, places)))
    del src, dst, by_part

    def sort(name: str, table: NDArray[Any] = NO_INDICES) -> Tensor:
        """Sort a column, as int64; a `table` converts local nodes to global IDs."""
        result = torch.empty(len(places), dtype=torch.int64, device="cpu")
        put(columns.pop(name), table, as_numpy(places), as_numpy(result))
        return result

    return VisibleEdges(sort(SRC, graph.node_id), sort(DST, graph.node_id), sort(EID), places, bounds)


def deal_parts(sizes: Sequence[int], workers: int) -> list[range]:
    """Consecutive partitions for every worker: at least one each, with about equal total sizes."""
    ends = list(accumulate(sizes))
    cuts = [0]
    for worker in range(1, workers):
        goal = ends[-1] * worker / workers
        first, last = cuts[-1] + 1, len(sizes) - (workers - worker)
        cuts.append(min(range(first, last + 1), key=lambda cut: abs(ends[cut - 1] - goal)))
    return [range(begin, end) for begin, end in pairwise([*cuts, len(sizes)])]


def deal_workers(sizes: Sequence[int], workers: int) -> list[range]:
    """Consecutive workers for every partition: at least one each, in proportion to sizes."""
    counts = [1] * len(sizes)
    for _ in range(workers - len(sizes)):
        counts[max(range(len(sizes)), key=lambda part: sizes[part] / counts[part])] += 1
    return [range(begin, end) for begin, end in runs_of(counts)]


def runs_of(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive ranges [begin, end) of these sizes."""
    return list(pairwise([0, *accumulate(sizes)]))


def equal_runs(costs: Tensor, count: int) -> list[tuple[int, int]]:
    """Split rows into ranges [begin, end) with about equal cost, from the cost of each row, (N,)."""
    reached = costs.cumsum(0)
    goals = torch.arange(1, count, device="cpu") * int(costs.sum()) // count
    return list(pairwise([0, *torch.searchsorted(reached, goals, right=True).tolist(), len(costs)]))


def renumber(data: PartitionData, part: int, order: Sequence[int]) -> PartitionData:
    """Renumber the data of partition `part` for a new order of partitions; `order` holds the old numbers."""
    if list(order) == sorted(order):
        return data
    ranges = runs_of([data.node_ranges[p][1] - data.node_ranges[p][0] for p in order])
    moved = {p: start - data.node_ranges[p][0] for p, (start, _) in zip(order, ranges, strict=True)}
    shards = []
    for p in order:
        (src, dst), features = data.all_shard_edges[p]
        shards.append(ShardEdgesAndFeatures((src + moved[p], dst + moved[part]), features))
    node_features = dict(data.node_features)
    if NID in node_features:
        node_features[NID] = node_features[NID] + moved[part]
    return data._replace(all_shard_edges=shards, node_ranges=ranges, node_features=node_features, partition_book=None)


def regroup(parts: Mapping[int, PartitionData], node_ranges: list[tuple[int, int]], worker: int) -> PartitionData:
    """Collect the data, on the CPU, of a worker that owns a range of nodes from one or several partitions.

    `parts` are the partitions that own the nodes, by number, ascending. Each feature is removed from them when it is
    copied, so memory holds at most one feature twice. The node ranges are those of the workers, [start, end).
    """
    own, first = node_ranges[worker], next(iter(parts.values()))
    ranges = [part.node_ranges[number] for number, part in parts.items()]
    return PartitionData(
        all_shard_edges=_shards(list(parts.values()), node_ranges, own),
        node_ranges=node_ranges,
        node_features=_node_features(parts, own),
        node_type_names=first.node_type_names,
        edge_type_names=first.edge_type_names,
        partition_book=first.partition_book,
        directory=first.directory,
        part_ranges=[(max(s, own[0]), min(e, own[1])) for s, e in ranges if s <= own[1] and e >= own[0]],
    )


def _node_features(parts: Mapping[int, PartitionData], own: tuple[int, int]) -> dict[str, Tensor]:
    """Features of the nodes in the range `own`."""
    cuts: list[dict[str, slice]] = []  # by part: the rows of every node type, and all rows under ""
    for number, part in parts.items():
        start, end = part.node_ranges[number]
        high = max(min(own[1], end) - start, 0)
        low = min(max(own[0] - start, 0), high)
        of_part = dict.fromkeys(["", *part.node_type_names], slice(low, high))
        if len(part.node_type_names) > 1:
            for kind, ntype in enumerate(part.node_type_names):
                of_type = part.node_features[NTYPE] == kind
                of_part[ntype] = slice(int(of_type[:low].sum()), int(of_type[:high].sum()))
        cuts.append(of_part)
    features = {}
    for key in dict.fromkeys(key for part in parts.values() for key in part.node_features):
        ntype = key.partition("/")[0] if "/" in key else ""
        rows = [of_part[ntype] for of_part in cuts]
        columns = [part.node_features.pop(key, None) for part in parts.values()]
        pieces = [None if column is None else column[cut] for column, cut in zip(columns, rows, strict=True)]
        features[key] = _joined(f"node feature {key!r}", pieces, [cut.stop - cut.start for cut in rows])
    return features


def _shards(
    parts: Sequence[PartitionData], node_ranges: list[tuple[int, int]], own: tuple[int, int]
) -> list[ShardEdgesAndFeatures]:
    """The edges into the nodes in the range `own`, by the worker that owns their source, in visible order."""
    shards = [shard for part in parts for shard in part.all_shard_edges]
    counts = [len(shard.edges[0]) for shard in shards]
    keys = dict.fromkeys(key for shard in shards for key in shard.edge_features)
    joined = {key: _field(shards, key, counts) for key in (EID, ETYPE) if key in keys}  # others are found by these
    src, dst = (torch.cat([shard.edges[end] for shard in shards]) for end in (0, 1))
    rows = ((dst >= own[0]) & (dst < own[1])).nonzero().squeeze(1)
    if EID in joined:
        rows = rows[joined[EID][rows].argsort()]
    owner = torch.searchsorted(torch.tensor([end for _, end in node_ranges], device=src.device), src[rows], right=True)
    order = (owner * (own[1] - own[0]) + dst[rows] - own[0]).argsort(stable=True)
    rows, owner = rows[order], owner[order]
    src, dst, bounds = src[rows], dst[rows], _bounds(owner, len(node_ranges))
    columns: dict[str, tuple[Tensor, list[int]]] = {}
    etypes = parts[0].edge_type_names
    kinds, names = None, {}
    if len(etypes) > 1:
        kinds = joined[ETYPE]
        names = {":".join(etype): kind for kind, etype in enumerate(etypes)}
        by_kind = torch.stack([piece.bincount(minlength=len(etypes)) for piece in kinds.split(counts)])
    for key in keys:
        kind = names.get(key.partition("/")[0])
        if kinds is None or kind is None:
            values = joined.pop(key) if key in joined else _field(shards, key, counts)
            columns[key] = _taken(values, rows), bounds
        else:
            has_kind = kinds == kind
            of_kind = has_kind[rows]
            values = _field(shards, key, by_kind[:, kind].tolist())
            values = _taken(values, (has_kind.cumsum(0) - 1)[rows[of_kind]])
            columns[key] = values, _bounds(owner[of_kind], len(node_ranges))
    return cut_shards(src, dst, bounds, columns)


def cut_shards(
    src: Tensor, dst: Tensor, bounds: Sequence[int], fields: Mapping[str, tuple[Tensor, Sequence[int]]]
) -> list[ShardEdgesAndFeatures]:
    """Cut edges and fields into shards, as slices, so the shards of a field are contiguous in memory.

    Every field comes with the bounds of its shards.
    """
    return [
        ShardEdgesAndFeatures(
            (src[begin:end], dst[begin:end]),
            {name: values[cuts[p] : cuts[p + 1]] for name, (values, cuts) in fields.items()},
        )
        for p, (begin, end) in enumerate(pairwise(bounds))
    ]


def _bounds(owner: Tensor, workers: int) -> list[int]:
    """The bounds of each worker's edges, (W + 1,), from the ascending numbers of workers."""
    return torch.searchsorted(owner, torch.arange(workers + 1, device=owner.device)).tolist()


def _field(shards: Sequence[ShardEdgesAndFeatures], key: str, counts: Sequence[int]) -> Tensor:
    """A field of the edges of all shards, concatenated; it is removed from the shards."""
    pieces = [shard.edge_features.pop(key, None) for shard in shards]
    return _joined(f"edge feature {key!r}", pieces, counts)


def _joined(what: str, pieces: Sequence[Tensor | None], counts: Sequence[int]) -> Tensor:
    """The pieces of a field, concatenated; a piece without rows may be None."""
    filled = [(piece, count) for piece, count in zip(pieces, counts, strict=True) if count]
    like = next(piece for piece, _ in [*filled, *((piece, 0) for piece in pieces)] if piece is not None)
    for piece, count in filled:
        if piece is None or len(piece) != count or (piece.dtype, piece.shape[1:]) != (like.dtype, like.shape[1:]):
            problem = "is missing" if piece is None else f"is {piece.dtype} {tuple(piece.shape)}"
            expected = f"{like.dtype} {(count, *like.shape[1:])}"
            raise PartitionError(f"The {what} {problem} in a partition; expected {expected}, as in the others.")
    rows = [piece for piece, _ in filled if piece is not None]
    return torch.cat(rows or [like[:0]], out=empty_spillable((sum(map(len, rows)), *like.shape[1:]), like.dtype))


def _taken(values: Tensor, rows: Tensor) -> Tensor:
    return torch.index_select(values, 0, rows, out=empty_spillable((len(rows), *values.shape[1:]), values.dtype))
