"""The structure of a distributed graph on one worker: edges from every partition into this one, and who reads what."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sar.comm.collectives import exchange_tensors
from sar.comm.group import Group
from sar.comm.halo_plan import HaloPlan, HaloSlice
from sar.common_tuples import EID, NTYPE, ORIG_ID, CanonicalEtype, PartitionData
from sar.core.constants import Constants
from sar.core.partition_data import (
    Shard,
    check_edge_ids,
    check_partition,
    join_features,
    own_part,
    part_of,
    select_relation,
    with_edge_ids,
)
from sar.errors import GraphError
from sar.id_slices import count_ids, less_first, number_distinct
from sar.kernels import EdgeBlock, load_kernels
from sar.kernels.edge_block import compress
from sar.raw_memory import settled

TILE_SIZES = 4
"""Sizes of tiles whose edges a relation keeps, the latest used: as many times the edges that read other workers."""


@dataclass(frozen=True)
class Relation:
    """The edges of one canonical edge type into this worker.

    blocks: one per source partition. Sources are numbered within that partition's halo list; those of the own partition
        are this worker's rows. Edge IDs are positions in the visible edge order, in which each shard is a slice.
    halos: for every other partition, the nodes that this worker reads: partition-local IDs over all types, ascending.
    plan: the halo lists of all workers, as the exchange needs them.
    num_src, num_dst: this worker's nodes of source and destination type.
    in_degrees, out_degrees: (num_dst,) and (num_src,) int64; out-degrees count the edges into all workers.
    message_order: (E,) integer, ascending in the order in which a node's messages come to Python reduce functions: the
        edges' original IDs, or else their IDs.
    constants: kept results of calls on operands that do not change. This and the other caches are no arguments, so that
        `dataclasses.replace` makes new ones: no relation can take over what was kept of another.
    """

    etype: CanonicalEtype
    blocks: list[EdgeBlock]
    halos: list[Tensor]
    plan: HaloPlan
    num_src: int
    num_dst: int
    num_edges_global: int
    in_degrees: Tensor
    out_degrees: Tensor
    message_order: Tensor
    constants: Constants = field(init=False, default_factory=Constants)
    # By size, the latest used last.
    _tiles: dict[int, dict[HaloSlice, EdgeBlock]] = field(init=False, default_factory=dict)
    _in_place: dict[int, EdgeBlock] = field(init=False, default_factory=dict)  # by part
    _inverse_degrees: dict[tuple[torch.dtype, int], Tensor] = field(init=False, default_factory=dict)

    @property
    def num_edges(self) -> int:
        return sum(block.num_edges for block in self.blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of the structure on this worker, with tiles and what else has been made of it so far."""
        tiles = [block for cut in self._tiles.values() for block in cut.values() if block not in self.blocks]
        tensors = [*self.halos, self.in_degrees, self.out_degrees, *self._inverse_degrees.values()]
        tensors += [block.cols for block in self._in_place.values()]
        blocks = sum(block.nbytes for block in (*self.blocks, *tiles))
        return blocks + self.plan.nbytes + sum(tensor.nbytes for tensor in tensors)

    def tile(self, tile: HaloSlice) -> EdgeBlock:
        """The edges that read a tile, sources renumbered within it; cut out once and kept with those of its size."""
        cut = self._tiles[tile.size] = self._tiles.pop(tile.size, {})
        if len(self._tiles) > TILE_SIZES:
            del self._tiles[next(iter(self._tiles))]
        if tile not in cut:
            cut[tile] = self.blocks[part_of(tile.peer)].select_sources(tile.begin, tile.end)
        return cut[tile]

    def in_place(self, worker: int, sources: Tensor) -> EdgeBlock:
        """The edges that read a worker's nodes, of which `sources` are its halo list; made once and kept."""
        part = part_of(worker)
        if part not in self._in_place:
            self._in_place[part] = self.blocks[part].within(sources)
        return self._in_place[part]

    @cached_property
    def in_edges(self) -> tuple[Tensor, Tensor]:
        """In-edges by destination: (N_dst + 1,) offsets, and (E,) edge IDs, int64, each node's by `message_order`."""
        destinations = torch.cat([block.destinations(0, block.num_edges) for block in self.blocks])
        edges = torch.argsort(self.message_order, stable=True)
        edges = edges[torch.argsort(destinations[edges], stable=True)]
        return functional.pad(self.in_degrees.cumsum(0), (1, 0)), edges

    def inverse_degrees(self, dtype: torch.dtype, dims: int) -> Tensor:
        """1 / in-degree, 1 without in-edges: (N_dst, 1, ...) with `dims` trailing dimensions; made once and kept."""
        key = (dtype, dims)
        if key not in self._inverse_degrees:
            with torch.inference_mode(False):  # else no later backward could use it
                degrees = self.in_degrees.clamp(min=1).to(dtype)
                self._inverse_degrees[key] = degrees.reciprocal_().view(-1, *[1] * dims)
        return self._inverse_degrees[key]

    def degrees_like(self, values: Tensor) -> Tensor:
        """In-degrees, at least 1, shaped to divide (N_dst, ...) values."""
        return self.in_degrees.clamp(min=1).to(values.dtype).view(-1, *[1] * (values.dim() - 1))

    def to(self, device: torch.device) -> "Relation":
        return replace(
            self,
            blocks=[block.to(device) for block in self.blocks],
            halos=[halo.to(device) for halo in self.halos],
            plan=self.plan.to(device),
            in_degrees=self.in_degrees.to(device),
            out_degrees=self.out_degrees.to(device),
            message_order=self.message_order.to(device),
        )


@dataclass(frozen=True)
class NodeSet:
    """The nodes on one side of a graph.

    ids: global IDs of this worker's nodes of every type, in the order of its rows, (N_type,) int64 each.
    rows: which of the partition's nodes of the type these are, counted from 0, (N_type,) int64 each.
    counts_global: nodes of every type on all workers.
    """

    ids: dict[str, Tensor]
    rows: dict[str, Tensor]
    counts_global: dict[str, int]

    @property
    def counts(self) -> dict[str, int]:
        return {ntype: len(ids) for ntype, ids in self.ids.items()}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.ids.values(), *self.rows.values()))

    def to(self, device: torch.device) -> "NodeSet":
        ids, rows = ({ntype: column.to(device) for ntype, column in x.items()} for x in (self.ids, self.rows))
        return replace(self, ids=ids, rows=rows)


@dataclass(frozen=True)
class Structure:
    """All relations of a graph, and how its nodes are spread.

    node_ranges: [start, end) of global node IDs of every partition.
    src, dst: sources and destinations; one and the same, except on message flow graphs.
    signature: equal on workers that hold parts of the same graph.
    make_sampling_graph: makes `sampling_graph`; handed in because the engine imports no other library's graphs.
    original_ids: of this worker's nodes, in the input graph and counted within types, (N_i,), where the data has them.
    """

    group: Group
    device: torch.device
    node_ranges: list[tuple[int, int]]
    src: NodeSet
    dst: NodeSet
    relations: list[Relation]
    signature: str
    make_sampling_graph: "Callable[[Structure], Any] | None" = None
    original_ids: Tensor | None = None

    @property
    def is_block(self) -> bool:
        return self.src is not self.dst

    @property
    def nbytes(self) -> int:
        """Bytes of the structure on this worker, with what has been made of it so far."""
        nodes = self.src.nbytes + (self.dst.nbytes if self.is_block else 0)
        return nodes + sum(relation.nbytes for relation in self.relations)

    @property
    def part(self) -> int:
        return own_part(self.group)

    @cached_property
    def sampling_graph(self) -> Any:
        """This worker's edges and their ends as a graph of another library, made once."""
        if self.make_sampling_graph is None:
            raise GraphError(
                "Message flow graphs and plans have no sampling_graph; take that of `construct_full_graph(data)`."
            )
        return self.make_sampling_graph(self)

    def with_relations(self, relations: list[Relation], how: str) -> "Structure":
        """The structure with other edges; `how` they came about makes the signature another one."""
        counts = [relation.num_edges_global for relation in relations]
        return replace(self, relations=relations, signature=digest(f"{self.signature} {how} {counts}"))

    def to(self, device: torch.device) -> "Structure":
        src = self.src.to(device)
        dst = self.dst.to(device) if self.is_block else src
        relations = [relation.to(device) for relation in self.relations]
        return replace(self, device=device, src=src, dst=dst, relations=relations)


@dataclass(frozen=True)
class AgreedGraph:
    """A graph whose parts the workers have compared, before any of its edges is indexed.

    nodes: as sources and as destinations.
    positions: of this worker's nodes within their types, int32; None where there is one type.
    shards: this worker's edges in visible order, by edge type and source partition.
    edges_global: edges of every type on all workers.
    signature: equal on workers that hold parts of the same graph.
    """

    group: Group
    device: torch.device
    data: PartitionData
    nodes: NodeSet
    positions: Tensor | None
    shards: dict[CanonicalEtype, list[Shard]]
    edges_global: list[int]
    signature: str

    @property
    def part(self) -> int:
        return own_part(self.group)

    def index(self, nodes: Tensor) -> Tensor:
        """Positions within their types, int32, of partition-local node IDs."""
        return nodes.to(torch.int32) if self.positions is None else torch.index_select(self.positions, 0, nodes)


def agree_on_graph(data: PartitionData, group: Group) -> AgreedGraph:
    """Check this worker's partition, and that all workers hold parts of the same graph; inside `group.guard()`.

    Raises:
        PartitionError: where the data contradicts itself or the number of workers.
        CommunicationError: where another worker raised, or holds another graph.
    """
    load_kernels()
    part = own_part(group)
    check_partition(data, part, group.world_size)
    names, etypes = data.node_type_names, data.edge_type_names
    graph = f"node ranges {data.node_ranges}, node types {names}, edge types {etypes}"
    if data.directory:
        graph += f", from a partition directory with the digest {data.directory}"
    group.agree(f"constructing the graph with {graph}")
    ids_by_type, positions = _number_within_types(data, part)
    counts = torch.tensor([len(ids) for ids in ids_by_type.values()])
    totals = torch.stack(group.all_gather(counts, "node counts")).sum(0).tolist()
    relations = [[select_relation(shard, k, data) for shard in data.all_shard_edges] for k in range(len(etypes))]
    edges = torch.tensor([sum(len(shard.src) for shard in shards) for shards in relations])
    all_edges = torch.stack(group.all_gather(edges, "edge counts"))  # (W, relations)
    shards = {}
    for k, etype in enumerate(etypes):
        first_id = int(all_edges[:part].sum() + all_edges[part, :k].sum())
        shards[etype] = with_edge_ids(relations[k], first_id)
    device = data.all_shard_edges[0].edges[0].device
    rows = {ntype: torch.arange(len(ids), device=device) for ntype, ids in ids_by_type.items()}
    nodes = NodeSet(ids_by_type, rows, dict(zip(names, totals, strict=True)))
    signature = digest(f"{graph} {totals} {all_edges.tolist()}")
    return AgreedGraph(group, device, data, nodes, positions, shards, all_edges.sum(0).tolist(), signature)


def build_structure(
    data: PartitionData, group: Group, make_sampling_graph: Callable[[Structure], Any] | None
) -> tuple[Structure, list[dict[str, Tensor]]]:
    """Agree with all workers on the graph, tell each which of its nodes this one reads, and index the edges.

    Args:
        data: this worker's partition.
        group: this worker's end of the group.
        make_sampling_graph: see `Structure`.

    Returns:
        The structure, and for every relation its edge features in the visible edge order, (E, ...) each.

    Raises:
        PartitionError, CommunicationError: as `agree_on_graph`.
    """
    with group.guard():
        graph = agree_on_graph(data, group)
        relations, features = [], []
        for (etype, shards), num_edges_global in zip(graph.shards.items(), graph.edges_global, strict=True):
            columns = join_features(shards)
            relations.append(_build_relation(graph, etype, shards, num_edges_global, message_order(columns)))
            features.append(columns)
        check_edge_ids(list(graph.shards.values()), group)
        ranges, nodes = list(data.node_ranges), graph.nodes
        original = data.node_features.get(ORIG_ID)
        structure = Structure(
            group, graph.device, ranges, nodes, nodes, relations, graph.signature, make_sampling_graph, original
        )
        return structure, features


def message_order(columns: dict[str, Tensor]) -> Tensor:
    """`Relation.message_order` of edges with these fields: that of DGL on the whole graph, where the data tells it."""
    original = columns.get(ORIG_ID)  # or a field of that name of the user's
    return original if original is not None and original.dtype == torch.int64 and original.dim() == 1 else columns[EID]


def digest(text: str) -> str:
    """A short name for what the text describes."""
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _number_within_types(data: PartitionData, part: int) -> tuple[dict[str, Tensor], Tensor | None]:
    """Global IDs of this worker's nodes by type, and the positions that `AgreedGraph` has."""
    (start, end), names = data.node_ranges[part], data.node_type_names
    device = data.all_shard_edges[0].edges[0].device
    nodes = torch.arange(start, end, device=device)
    if len(names) == 1:
        return {names[0]: nodes}, None
    kinds = data.node_features[NTYPE].to(device)
    ids_by_type = {name: nodes[kinds == kind] for kind, name in enumerate(names)}
    positions = torch.empty(end - start, dtype=torch.int32, device=device)
    for ids in ids_by_type.values():
        positions[ids - start] = torch.arange(len(ids), dtype=torch.int32, device=device)
    return ids_by_type, positions


def _build_relation(
    graph: AgreedGraph, etype: CanonicalEtype, shards: list[Shard], num_edges_global: int, order: Tensor
) -> Relation:
    index, part, device, ranges = graph.index, graph.part, graph.device, graph.data.node_ranges
    num_src, num_dst = graph.nodes.counts[etype[0]], graph.nodes.counts[etype[2]]
    blocks, halos, offset = [], [], 0
    for p, shard in enumerate(shards):
        first, last = ranges[p]
        # Destinations first: they are dropped before there are columns, which the graph keeps.
        rows, indptr = compress(index(less_first(shard.dst, ranges[part][0])), num_dst)
        if p == part:
            halo, cols, sources = shard.src[:0].to(torch.int32), index(less_first(shard.src, first)), num_src
        else:
            halo, cols = number_distinct(less_first(shard.src, first), last - first)
            sources = len(halo)
        block = EdgeBlock(rows, indptr, cols, sources, num_dst, edge_offset=offset)
        blocks.append(block)
        halos.append(settled(halo))
        offset += block.num_edges
    send_rows = [index(rows.to(device)) for rows in exchange_tensors(halos)]
    degrees = [count_ids(block.cols, block.num_src) for block in blocks]
    own_degrees = degrees[part]
    degrees[part] = own_degrees[:0]
    for rows, theirs in zip(send_rows, exchange_tensors(degrees), strict=True):
        own_degrees.index_add_(0, rows, theirs.to(device))
    in_degrees = torch.zeros(num_dst, dtype=torch.int64, device=device)
    for block in blocks:
        in_degrees.index_add_(0, block.rows, block.indptr.diff().long())
    plan = HaloPlan.agreed(graph.group, send_rows, halos, num_src, f"{etype}")
    return Relation(etype, blocks, halos, plan, num_src, num_dst, num_edges_global, in_degrees, own_degrees, order)
