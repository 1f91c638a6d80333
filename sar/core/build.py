"""Checks `PartitionData`, and builds the structure of a distributed graph from it.

The visible edge order of a relation: source partition ascending, then destination, then edge ID.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sar.comm.group import Group
from sar.comm.tiles import HaloPlan
from sar.common_tuples import EID, ETYPE, NTYPE, ORIG_ID, CanonicalEtype, PartitionData, ShardEdgesAndFeatures
from sar.core.relation import GraphLibrary, NodeSet, Relation, Structure, digest
from sar.errors import PartitionError
from sar.kernels import EdgeBlock, load_kernels
from sar.kernels.edge_block import compress
from sar.tensors.ids import is_sorted, less_first, number_distinct
from sar.tensors.lasting import lasting
from sar.tensors.spillable import moved_to_file


class Shard(NamedTuple):
    """The edges of one relation from one partition in visible order: global node IDs, and features by bare name."""

    src: Tensor  # (E_shard,) int64
    dst: Tensor  # (E_shard,) int64
    features: dict[str, Tensor]  # (E_shard, ...) each


def check_partition(data: PartitionData, part: int, world_size: int) -> None:
    """Raise `PartitionError` if this worker's data contradicts itself or the number of workers."""
    if not isinstance(data, PartitionData):
        raise PartitionError(
            f"The data of a partition is a {type(data).__name__}; expected what load_dgl_partition_data returns."
        )
    if len(data.node_ranges) != world_size or len(data.all_shard_edges) != world_size:
        raise PartitionError(
            f"The data has {len(data.node_ranges)} node ranges and {len(data.all_shard_edges)} shards for {world_size} "
            "workers; expected one each per worker. Start as many workers as there are partitions."
        )
    start, end = data.node_ranges[part]
    if NTYPE not in data.node_features and len(data.node_type_names) > 1:
        raise PartitionError(
            f"The graph has {len(data.node_type_names)} node types, but node_features lacks {NTYPE!r}."
        )
    kinds = data.node_features.get(NTYPE)
    if kinds is not None and len(kinds) != end - start:
        raise PartitionError(
            f"node_features[{NTYPE!r}] has {len(kinds)} rows for {end - start} nodes of partition {part}."
        )
    for p, shard in enumerate(data.all_shard_edges):
        src, dst = shard.edges
        if src.shape != dst.shape or src.dim() != 1:
            raise PartitionError(
                f"The shard from partition {p} has sources {tuple(src.shape)}, destinations {dst.shape}."
            )
        if ETYPE not in shard.edge_features and len(data.edge_type_names) > 1 and len(src):
            raise PartitionError(f"The graph has several edge types, but the shard from {p} lacks {ETYPE!r}.")
        for nodes, (first, bound), what in (
            (src, data.node_ranges[p], f"sources of the shard from partition {p}"),
            (dst, (start, end), f"destinations of the shard from partition {p} into partition {part}"),
        ):
            if not len(nodes):
                continue
            least, greatest = map(int, nodes.aminmax())
            if not first <= least <= greatest < bound:
                raise PartitionError(
                    f"The {what} reach from {least} to {greatest}; expected IDs in [{first}, {bound}). Has this worker "
                    "loaded another worker's partition?"
                )


def select_relation(shard: ShardEdgesAndFeatures, number: int, data: PartitionData) -> Shard:
    """The edges of edge type `number` in visible order; a view of the shard if they are all its edges, and sorted."""
    src, dst = shard.edges
    features = dict(shard.edge_features)
    rows, several = None, len(data.edge_type_names) > 1
    kinds = features.pop(ETYPE, None) if several else None  # with one type, the field is the user's
    if kinds is not None:
        rows = (kinds == number).nonzero().squeeze(1)
        src, dst = src[rows], dst[rows]
    prefix = ":".join(data.edge_type_names[number]) + "/"
    selected = {}
    for key, value in features.items():
        if key.startswith(prefix):
            selected[key.removeprefix(prefix)] = _checked_rows(key, value, len(src))
        elif "/" not in key or not several:
            value = _checked_rows(key, value, len(shard.edges[0]))
            selected[key] = value if rows is None else value[rows]
    ids = selected.get(EID)
    if is_sorted(dst, ids):
        return Shard(src, dst, selected)
    order = torch.argsort(dst if ids is None else ids, stable=True)
    if ids is not None:
        order = order[torch.argsort(dst[order], stable=True)]
    return Shard(src[order], dst[order], {name: values[order] for name, values in selected.items()})


def join_features(shards: list[Shard]) -> dict[str, Tensor]:
    """Edge features of a relation in the visible edge order.

    Readers of partition files store a feature's shards contiguously. Then the result is a view.
    """
    joined = {}
    for name in dict.fromkeys(name for shard in shards for name in shard.features):
        for p, shard in enumerate(shards):
            if name not in shard.features and len(shard.src):
                raise PartitionError(f"Edge feature {name!r} is missing on the shard from partition {p}.")
        pieces = [shard.features[name] for shard in shards if name in shard.features]
        if len({(piece.dtype, piece.shape[1:]) for piece in pieces}) > 1:
            raise PartitionError(f"Edge feature {name!r} has different dtypes or widths on different shards.")
        pieces = [piece for piece in pieces if len(piece)] or pieces[:1]  # empty ones have no address
        first, end = pieces[0], pieces[0].data_ptr()
        adjacent = True
        for piece in pieces:
            same_storage = piece.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            adjacent = adjacent and same_storage and piece.is_contiguous() and piece.data_ptr() == end
            end += piece.nbytes
        rows = sum(map(len, pieces))
        joined[name] = first.as_strided((rows, *first.shape[1:]), first.stride()) if adjacent else torch.cat(pieces)
    return joined


def _checked_rows(key: str, value: Tensor, rows: int) -> Tensor:
    if value.dim() == 0 or len(value) != rows:
        raise PartitionError(f"Edge feature {key!r} has shape {tuple(value.shape)}; expected {rows}, one per edge.")
    return value


@dataclass(frozen=True)
class WorkerGraph:
    """A worker's part of a graph, before its edges are indexed. The last fields are empty until workers agree on it."""

    group: Group
    device: torch.device
    data: PartitionData
    nodes: NodeSet  # as sources and as destinations
    positions: Tensor | None  # indices of this worker's nodes within their types, int32; None if there is one type
    shards: dict[CanonicalEtype, list[Shard]]  # this worker's edges, by source partition
    edges_global: Sequence[int] = ()  # number of edges of every type on all workers
    signature: str = ""  # equal on workers that hold parts of the same graph

    def index(self, nodes: Tensor) -> Tensor:
        """Convert partition-local node IDs to positions within their types, int32."""
        return nodes.to(torch.int32) if self.positions is None else torch.index_select(self.positions, 0, nodes)


def check_graph(data: PartitionData, group: Group) -> WorkerGraph:
    """Check this worker's partition, and sort its edges by type; without communication."""
    part = group.rank
    check_partition(data, part, group.world_size)
    device = data.all_shard_edges[0].edges[0].device
    if device.type == "cpu":
        load_kernels()
    names, (start, end) = data.node_type_names, data.node_ranges[part]
    own, positions = torch.arange(start, end, device=device), None
    ids_by_type = {names[0]: own}
    if len(names) > 1:
        kinds = data.node_features[NTYPE].to(device)
        ids_by_type = {name: own[kinds == kind] for kind, name in enumerate(names)}
        positions = torch.empty(end - start, dtype=torch.int32, device=device)
        for ids in ids_by_type.values():
            positions[ids - start] = torch.arange(len(ids), dtype=torch.int32, device=device)
    rows = {ntype: torch.arange(len(ids), device=device) for ntype, ids in ids_by_type.items()}
    shards = {
        etype: [select_relation(shard, k, data) for shard in data.all_shard_edges]
        for k, etype in enumerate(data.edge_type_names)
    }
    return WorkerGraph(group, device, data, NodeSet(ids_by_type, rows, {}), positions, shards)


def agree_on_graph(graph: WorkerGraph) -> WorkerGraph:
    """Check that all workers hold parts of the same graph, and number edges without IDs; inside `group.guard()`."""
    group, data, names, etypes = graph.group, graph.data, graph.data.node_type_names, graph.data.edge_type_names
    text = f"node ranges {data.node_ranges}, node types {names}, edge types {etypes}"
    if data.directory:
        text += f", from a partition directory with the digest {data.directory}"
    group.agree(f"constructing the graph with {text}")
    own = list(graph.nodes.counts.values())
    for shards in graph.shards.values():
        ids = [shard.features[EID].aminmax() for shard in shards if EID in shard.features and len(shard.src)]
        first, last = min((int(i.min) for i in ids), default=0), max((int(i.max) for i in ids), default=-1)
        has_ids = any(EID in shard.features for shard in shards)
        own += [sum(len(shard.src) for shard in shards), has_ids, first, last]
    gathered = torch.tensor(group.gather_numbers(own, "counts of nodes and edges"), device="cpu")
    totals = gathered[:, : len(names)].sum(0).tolist()
    of_edges = gathered[:, len(names) :].view(group.world_size, len(etypes), 4)
    counts = of_edges[:, :, 0]
    for k, etype in enumerate(etypes):
        if len(of_edges[counts[:, k] > 0, k, 1].unique()) > 1:
            raise PartitionError(
                f"Edges of type {etype} have IDs ({EID}) on some workers only; expected them on all workers or on none."
            )
    if bool(of_edges[counts > 0][:, 1].all()):
        _check_edge_ids(of_edges.tolist())
    agreed, first_id = {}, int(counts[: group.rank].sum())
    for k, (etype, shards) in enumerate(graph.shards.items()):
        agreed[etype] = shards
        if not any(EID in shard.features for shard in shards):
            sizes = [len(shard.src) for shard in shards]
            ids = torch.arange(first_id, first_id + sum(sizes), device=graph.device).split(sizes)
            agreed[etype] = [
                shard._replace(features={**shard.features, EID: of_shard})
                for shard, of_shard in zip(shards, ids, strict=True)
            ]
        first_id += int(counts[group.rank, k])
    return replace(
        graph,
        nodes=replace(graph.nodes, counts_global=dict(zip(names, totals, strict=True))),
        shards=agreed,
        edges_global=counts.sum(0).tolist(),
        signature=digest(f"{text} {totals} {counts.tolist()}"),
    )


def _check_edge_ids(of_edges: list[list[list[int]]]) -> None:
    """Check that the edge IDs of all workers fit together, from each relation's count, whether it has IDs, and range.

    Partitioners number edges consecutively from one worker to the next. If every worker has such a run, the runs must
    join, in any order; other IDs are not checked.
    """
    runs = []
    for rank, of_worker in enumerate(of_edges):
        filled = [(first, last, count) for count, _, first, last in of_worker if count]
        if filled:
            firsts, lasts, counts = zip(*filled, strict=True)
            runs.append((min(firsts), max(lasts), sum(counts), rank))
    if any(last - first + 1 != count for first, last, count, _ in runs):
        return
    expected = 0
    for first, last, count, rank in sorted(runs):
        if first != expected:
            raise PartitionError(
                f"The edges of worker {rank} have the IDs {first} to {last}; expected them to begin at {expected}, "
                "after those before. The workers hold parts of different graphs: load one partitioning."
            )
        expected += count


class Halos(NamedTuple):
    """The remote nodes that a worker reads in a relation, and its own nodes that other workers read."""

    read: list[Tensor]  # by owner: partition-local IDs over all types, ascending; empty for this worker
    read_by: list[Tensor]  # by reader: rows of this worker
    edges: list[Tensor]  # by reader: number of its edges that read each of `read_by`
    sizes: Tensor  # (W, W): number of nodes of each worker that a worker reads, by reader

    @classmethod
    def exchanged(cls, graph: WorkerGraph, read: list[Tensor], edges: list[Tensor], etype: CanonicalEtype) -> "Halos":
        """Send all workers the nodes that this worker reads, and the number of edges that do; in an agreed call."""
        group, call = graph.group, f"halo lists of {etype}"
        sizes = torch.tensor(group.gather_numbers([*map(len, read)], call), device="cpu")
        sent = [torch.stack(pair, 1) for pair in zip(read, edges, strict=True)]
        sent[group.rank] = sent[group.rank].to(group.device)
        into = [torch.empty(n, 2, dtype=torch.int32, device=group.device) for n in sizes[:, group.rank].tolist()]
        pairs = [received.to(graph.device).T.contiguous() for received in group.exchange(call, sent, into)]
        return cls(read, [graph.index(nodes) for nodes, _ in pairs], [counts for _, counts in pairs], sizes)


@lasting
def build_structure(
    data: PartitionData, group: Group, library: GraphLibrary | None
) -> tuple[Structure, list[dict[str, Tensor]]]:
    """Build the structure of a graph; a collective call. The workers agree on the graph and exchange halo lists.

    Returns the structure, and the edge features of every relation in the visible edge order, (E, ...) each.
    """
    with group.guard():
        graph = check_graph(data, group)
        part, index, counts = group.rank, graph.index, graph.nodes.counts
        # Local work comes first, while the edges are in memory.
        indexed = []
        for etype, shards in graph.shards.items():
            blocks, halos, edges, offset = [], [], [], 0
            for p, (shard, (first, last)) in enumerate(zip(shards, data.node_ranges, strict=True)):
                # Destinations come first, to be freed before the columns, which the graph keeps, exist.
                num_src, num_dst = counts[etype[0]], counts[etype[2]]
                rows, indptr = compress(index(less_first(shard.dst, data.node_ranges[part][0])))
                if p == part:
                    cols = index(less_first(shard.src, first))
                    halo = degrees = cols.new_empty(0)
                else:
                    halo, degrees, cols = number_distinct(less_first(shard.src, first), last - first)
                    num_src = len(halo)
                blocks.append(EdgeBlock(rows, indptr, cols, num_src, num_dst, edge_offset=offset))
                halos.append(moved_to_file(halo))
                edges.append(degrees)
                offset += blocks[-1].num_edges
            indexed.append((blocks, halos, edges))
        graph = agree_on_graph(graph)
        relations, features = [], []
        for k, ((etype, shards), (blocks, read, edges)) in enumerate(zip(graph.shards.items(), indexed, strict=True)):
            features.append(join_features(shards))
            lists = Halos.exchanged(graph, read, edges, etype)
            total = graph.nodes.counts_global[etype[0]]
            relations.append(connect(graph, etype, blocks, lists, total, graph.edges_global[k], features[-1]))
        ranges, nodes, original = list(data.node_ranges), graph.nodes, data.node_features.get(ORIG_ID)
        original = None if original is None else original.clone()
        structure = Structure(group, graph.device, ranges, nodes, nodes, relations, graph.signature, library, original)
        return structure, features


def connect(
    graph: WorkerGraph,
    etype: CanonicalEtype,
    blocks: list[EdgeBlock],
    halos: Halos,
    num_src_global: int,
    num_edges_global: int,
    features: dict[str, Tensor],
) -> Relation:
    """Build the relation of these edges, with degrees; a collective call. `Relation` documents the arguments."""
    own, group = blocks[graph.group.rank], graph.group
    out_degrees = own.cols.bincount(minlength=own.num_src)
    for rows, counts in zip(halos.read_by, halos.edges, strict=True):
        out_degrees.index_add_(0, rows, counts.long())
    in_degrees = torch.zeros(own.num_dst, dtype=torch.int64, device=graph.device)
    for block in blocks:
        in_degrees.index_add_(0, block.rows, block.indptr.diff().long())
    order = features.get(ORIG_ID)  # DGL's order on the whole graph, unless a user's field has the same name
    if order is None or order.dtype != torch.int64 or order.dim() != 1:
        order = features[EID]
    plan = HaloPlan.shared(group, halos.read_by, halos.sizes.T, num_src_global // group.world_size, f"{etype}")
    sizes = own.num_src, own.num_dst, num_edges_global
    return Relation(etype, blocks, halos.read, plan, *sizes, in_degrees, out_degrees, order)
