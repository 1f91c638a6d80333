"""Checks `PartitionData`, and builds the structure of a distributed graph from it.

The visible edge order of a relation: source partition ascending, then destination, then edge ID.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sar.comm.collectives import exchange_tensors
from sar.comm.group import Group
from sar.comm.tiles import HaloPlan
from sar.common_tuples import EID, ETYPE, NTYPE, ORIG_ID, CanonicalEtype, PartitionData, ShardEdgesAndFeatures
from sar.core.relation import GraphLibrary, NodeSet, Relation, Structure, digest
from sar.errors import PartitionError
from sar.kernels import EdgeBlock, load_kernels
from sar.kernels.edge_block import compress
from sar.tensors.ids import count_ids, is_sorted, less_first, number_distinct
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
            if len(nodes) and not (int(nodes.min()) >= first and int(nodes.max()) < bound):
                raise PartitionError(
                    f"The {what} reach from {int(nodes.min())} to {int(nodes.max())}; expected IDs in [{first}, "
                    f"{bound}). Has this worker loaded another worker's partition?"
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


def check_edge_ids(relations: list[list[Shard]], group: Group) -> None:
    """Check, together with all workers, that their edge IDs fit together. This is the last step of the construction.

    Partitioners number edges consecutively from one worker to the next. If every worker has such a run, the runs must
    join, in any order; other IDs are not checked.
    """
    ids = [s.features[EID] for shards in relations for s in shards if EID in s.features and len(s.src)]
    first, last = min((int(i.min()) for i in ids), default=0), max((int(i.max()) for i in ids), default=-1)
    count = sum(len(i) for i in ids)
    runs = group.gather_numbers([first, last, count], "checking edge IDs")
    if any(last - first + 1 != count for first, last, count in runs):
        return
    expected = 0
    for (first, last, count), rank in sorted((run, rank) for rank, run in enumerate(runs)):
        if count and first != expected:
            raise PartitionError(
                f"The edges of worker {rank} have the IDs {first} to {last}; expected them to begin at {expected}, "
                "after those before. The workers hold parts of different graphs: load one partitioning."
            )
        expected += count


def _checked_rows(key: str, value: Tensor, rows: int) -> Tensor:
    if value.dim() == 0 or len(value) != rows:
        raise PartitionError(f"Edge feature {key!r} has shape {tuple(value.shape)}; expected {rows}, one per edge.")
    return value


@dataclass(frozen=True)
class AgreedGraph:
    """A graph whose partitions the workers have compared, before its edges are indexed."""

    group: Group
    device: torch.device
    data: PartitionData
    nodes: NodeSet  # as sources and as destinations
    positions: Tensor | None  # indices of this worker's nodes within their types, int32; None if there is one type
    shards: dict[CanonicalEtype, list[Shard]]  # this worker's edges, by source partition
    edges_global: list[int]  # number of edges of every type on all workers
    signature: str  # equal on workers that hold parts of the same graph

    def index(self, nodes: Tensor) -> Tensor:
        """Convert partition-local node IDs to positions within their types, int32."""
        return nodes.to(torch.int32) if self.positions is None else torch.index_select(self.positions, 0, nodes)


def agree_on_graph(data: PartitionData, group: Group) -> AgreedGraph:
    """Check this worker's partition, and that all workers hold parts of the same graph; inside `group.guard()`."""
    part = group.rank
    check_partition(data, part, group.world_size)
    device = data.all_shard_edges[0].edges[0].device
    if device.type == "cpu":
        load_kernels()
    names, etypes = data.node_type_names, data.edge_type_names
    graph = f"node ranges {data.node_ranges}, node types {names}, edge types {etypes}"
    if data.directory:
        graph += f", from a partition directory with the digest {data.directory}"
    group.agree(f"constructing the graph with {graph}")
    start, end = data.node_ranges[part]
    own, positions = torch.arange(start, end, device=device), None
    ids_by_type = {names[0]: own}
    if len(names) > 1:
        kinds = data.node_features[NTYPE].to(device)
        ids_by_type = {name: own[kinds == kind] for kind, name in enumerate(names)}
        positions = torch.empty(end - start, dtype=torch.int32, device=device)
        for ids in ids_by_type.values():
            positions[ids - start] = torch.arange(len(ids), dtype=torch.int32, device=device)
    counts = torch.tensor([len(ids) for ids in ids_by_type.values()], device="cpu")
    totals = torch.stack(group.all_gather(counts, "node counts")).sum(0).tolist()
    relations = [[select_relation(shard, k, data) for shard in data.all_shard_edges] for k in range(len(etypes))]
    edges = torch.tensor([sum(len(shard.src) for shard in shards) for shards in relations], device="cpu")
    have_ids = torch.tensor([any(EID in shard.features for shard in shards) for shards in relations], device="cpu")
    gathered = torch.stack(group.all_gather(torch.stack([edges, have_ids.long()]), "edge counts"))
    all_edges, have_ids = gathered[:, 0], gathered[:, 1].bool()  # (W, relations)
    for k, etype in enumerate(etypes):
        if len(have_ids[all_edges[:, k] > 0, k].unique()) > 1:
            raise PartitionError(
                f"Edges of type {etype} have IDs ({EID}) on some workers only; expected them on all workers or on none."
            )
    shards = {}
    for k, etype in enumerate(etypes):
        first_id = int(all_edges[:part].sum() + all_edges[part, :k].sum())
        shards[etype] = relations[k]
        if not any(EID in shard.features for shard in relations[k]):
            sizes = [len(shard.src) for shard in relations[k]]
            ids = torch.arange(first_id, first_id + sum(sizes), device=device).split(sizes)
            shards[etype] = [
                shard._replace(features={**shard.features, EID: of_shard})
                for shard, of_shard in zip(relations[k], ids, strict=True)
            ]
    rows = {ntype: torch.arange(len(ids), device=device) for ntype, ids in ids_by_type.items()}
    nodes = NodeSet(ids_by_type, rows, dict(zip(names, totals, strict=True)))
    signature = digest(f"{graph} {totals} {all_edges.tolist()}")
    return AgreedGraph(group, device, data, nodes, positions, shards, all_edges.sum(0).tolist(), signature)


@lasting
def build_structure(
    data: PartitionData, group: Group, library: GraphLibrary | None
) -> tuple[Structure, list[dict[str, Tensor]]]:
    """Build the structure of a graph; a collective call. The workers agree on the graph and exchange halo lists.

    Returns the structure, and the edge features of every relation in the visible edge order, (E, ...) each.
    """
    with group.guard():
        graph = agree_on_graph(data, group)
        part, index, counts, relations, features = group.rank, graph.index, graph.nodes.counts, [], []
        for (etype, shards), num_edges_global in zip(graph.shards.items(), graph.edges_global, strict=True):
            num_src, num_dst = counts[etype[0]], counts[etype[2]]
            features.append(join_features(shards))
            blocks, halos, offset = [], [], 0
            for p, (shard, (first, last)) in enumerate(zip(shards, data.node_ranges, strict=True)):
                # Compress the destinations first, so that they are freed before the columns, which the graph keeps,
                # exist.
                rows, indptr = compress(index(less_first(shard.dst, data.node_ranges[part][0])), num_dst)
                if p == part:
                    halo, cols, sources = shard.src[:0].to(torch.int32), index(less_first(shard.src, first)), num_src
                else:
                    halo, cols = number_distinct(less_first(shard.src, first), last - first)
                    sources = len(halo)
                blocks.append(EdgeBlock(rows, indptr, cols, sources, num_dst, edge_offset=offset))
                halos.append(moved_to_file(halo))
                offset += blocks[-1].num_edges
            send_rows = [index(rows.to(graph.device)) for rows in exchange_tensors(halos)]
            relations.append(connect(graph, etype, blocks, halos, send_rows, num_edges_global, features[-1]))
        check_edge_ids(list(graph.shards.values()), group)
        ranges, nodes, original = list(data.node_ranges), graph.nodes, data.node_features.get(ORIG_ID)
        original = None if original is None else original.clone()
        structure = Structure(group, graph.device, ranges, nodes, nodes, relations, graph.signature, library, original)
        return structure, features


def connect(
    graph: AgreedGraph,
    etype: CanonicalEtype,
    blocks: list[EdgeBlock],
    halos: list[Tensor],
    send_rows: list[Tensor],
    num_edges_global: int,
    features: dict[str, Tensor],
) -> Relation:
    """Build the relation of these edges; a collective call that counts degrees and exchanges the sizes of halo lists.

    `send_rows` are the rows of this worker that each worker reads. `Relation` documents the other arguments.
    """
    num_src, num_dst = blocks[graph.group.rank].num_src, blocks[graph.group.rank].num_dst
    degrees = [count_ids(block.cols, block.num_src) for block in blocks]
    out_degrees = degrees[graph.group.rank]
    degrees[graph.group.rank] = out_degrees[:0]
    for rows, counts in zip(send_rows, exchange_tensors(degrees), strict=True):
        out_degrees.index_add_(0, rows, counts.to(graph.device))
    in_degrees = torch.zeros(num_dst, dtype=torch.int64, device=graph.device)
    for block in blocks:
        in_degrees.index_add_(0, block.rows, block.indptr.diff().long())
    order = features.get(ORIG_ID)  # DGL's order on the whole graph, unless a user's field has the same name
    if order is None or order.dtype != torch.int64 or order.dim() != 1:
        order = features[EID]
    plan = HaloPlan.agreed(graph.group, send_rows, halos, num_src, f"{etype}")
    return Relation(etype, blocks, halos, plan, num_src, num_dst, num_edges_global, in_degrees, out_degrees, order)
