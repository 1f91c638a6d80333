"""The structure of a distributed graph on one worker: edges from every partition into this one, and halo lists."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sar.comm.group import Group
from sar.comm.tiles import HaloPlan, HaloSlice
from sar.common_tuples import EID, ORIG_ID, CanonicalEtype
from sar.errors import GraphError, MissingMethodError
from sar.kernels import EdgeBlock, accumulation_dtype
from sar.tensors.ids import to_offsets
from sar.tensors.lasting import lasting

TILE_SIZES = 4
"""Number of tile sizes for which a relation caches the edges of each tile. Each size takes one more copy of the edges
from other workers."""


def _version(tensor: Tensor) -> int:
    """Number of in-place changes of a tensor; 0 for inference tensors, which do not count them."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class Relation:
    """The edges of one canonical edge type into this worker."""

    etype: CanonicalEtype
    # One block per source partition. Sources are numbered within that partition's halo list; in this worker's own
    # partition they are its rows. Edge IDs are positions in the visible edge order, in which each shard is a slice.
    blocks: list[EdgeBlock]
    # Halo lists: the nodes of every other partition that this worker reads, as partition-local IDs over all types,
    # ascending.
    halos: list[Tensor]
    plan: HaloPlan
    num_src: int
    num_dst: int
    num_edges_global: int
    in_degrees: Tensor  # (num_dst,) int64
    out_degrees: Tensor  # (num_src,) int64; counts edges into all workers
    # Sort keys of a node's messages for Python reduce functions, (E,) integer: the edges' original IDs, or else their
    # IDs. The user sees this tensor as a field, so `unchanged_order` checks that it was not changed.
    message_order: Tensor
    next_id: int = 0  # above the IDs of all edges before the graph was changed, so that none is given twice
    # Caches are no arguments, so that `dataclasses.replace` creates empty ones: they are valid for this relation only.
    _order_version: int = field(init=False)
    # By tile size; the latest used is last.
    _tiles: dict[int, dict[HaloSlice, EdgeBlock]] = field(init=False, default_factory=dict)
    _in_place: dict[int, EdgeBlock] = field(init=False, default_factory=dict)  # by part
    _degrees: dict[tuple[torch.dtype, int, bool, float], Tensor] = field(init=False, default_factory=dict)
    operations: dict[Any, Any] = field(init=False, default_factory=dict)  # built-in calls, compiled: see `Operation`
    checked: set[Any] = field(init=False, default_factory=set)  # Python functions, by `SpotCheck`

    def __post_init__(self) -> None:
        object.__setattr__(self, "_order_version", _version(self.message_order))

    @property
    def unchanged_order(self) -> Tensor:
        """`message_order`. Raises a GraphError if it was changed in place since the graph was constructed."""
        if _version(self.message_order) != self._order_version:
            raise GraphError(
                f"The edge IDs of {self.etype}, in edata['{ORIG_ID}'] or edata['{EID}'], were changed in place, so the "
                "order in which messages come to Python reduce functions is lost. Set a changed copy instead."
            )
        return self.message_order

    @cached_property
    def num_edges(self) -> int:
        return sum(block.num_edges for block in self.blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of the structure on this worker, with its caches."""
        tiles = [block for cut in self._tiles.values() for block in cut.values() if block not in self.blocks]
        tensors = [*self.halos, *self.plan.send_rows, self.in_degrees, self.out_degrees]
        tensors += self._degrees.values()
        blocks = *self.blocks, *tiles, *self._in_place.values()
        return sum(block.nbytes for block in blocks) + sum(tensor.nbytes for tensor in tensors)

    def tile(self, tile: HaloSlice) -> EdgeBlock:
        """The edges that read a tile, with sources numbered within the tile; cached by tile size."""
        cut = self._tiles[tile.size] = self._tiles.pop(tile.size, {})
        if len(self._tiles) > TILE_SIZES:
            del self._tiles[next(iter(self._tiles))]
        if tile not in cut:
            cut[tile] = self.blocks[tile.owner].select_sources(tile.begin, tile.end)
        return cut[tile]

    def in_place(self, worker: int, sources: Tensor) -> EdgeBlock:
        """The edges from a worker, with sources reindexed from its halo list `sources` to its rows; cached."""
        if worker not in self._in_place:
            self._in_place[worker] = self.blocks[worker].within(sources)
        return self._in_place[worker]

    def in_edge_order(self, values: list[Tensor]) -> Tensor:
        """An edge field, (E, ...), from the values of each block's edges by position, (E_block, ...)."""
        column = torch.cat(values)
        if all(block.edge_ids is None for block in self.blocks):
            return column
        ids = torch.cat([block.ids(0, block.num_edges) for block in self.blocks])
        return torch.empty_like(column).index_copy_(0, ids, column)

    @cached_property
    @lasting
    def in_edges(self) -> tuple[Tensor, Tensor]:
        """In-edges by destination: (N_dst + 1,) offsets, and (E,) int64 edge IDs, within nodes by `message_order`."""
        destinations = self.in_edge_order([block.destinations(0, block.num_edges) for block in self.blocks])
        edges = torch.argsort(self.unchanged_order, stable=True)
        edges = edges[torch.argsort(destinations[edges], stable=True)]
        return to_offsets(self.in_degrees), edges

    @cached_property
    @lasting
    def nodes_by_degree(self) -> list[tuple[int, Tensor]]:
        """Nodes grouped by in-degree, in ascending order, (N_degree,) int64 each. Isolated nodes are skipped."""
        degrees = self.in_degrees[self.in_degrees > 0].unique().tolist()
        return [(degree, (self.in_degrees == degree).nonzero().squeeze(1)) for degree in degrees]

    @cached_property
    def has_isolated(self) -> bool:
        """Whether a node of this worker has no in-edges."""
        return bool((self.in_degrees == 0).any())

    def degrees(self, dtype: torch.dtype, dims: int = 2, *, out: bool = False, power: float = 1.0) -> Tensor:
        """In-degrees or out-degrees, at least 1, to a power, (N, 1, ...) with `dims` dimensions; cached."""
        key = dtype, dims, out, power
        degrees = self._degrees.get(key)
        if degrees is None:
            degrees = self._degrees[key] = self._make_degrees(*key)
        return degrees

    @lasting
    def _make_degrees(self, dtype: torch.dtype, dims: int, out: bool, power: float) -> Tensor:
        degrees = (self.out_degrees if out else self.in_degrees).clamp(min=1).to(accumulation_dtype(dtype))
        degrees = degrees if power == 1 else degrees.reciprocal() if power == -1 else degrees.pow(power)
        return degrees.to(dtype).view(-1, *[1] * (dims - 1))

    @lasting
    def to(self, device: torch.device) -> "Relation":
        return replace(
            self,
            blocks=[block.to(device) for block in self.blocks],
            halos=[halo.to(device) for halo in self.halos],
            plan=self.plan.to(device),
            in_degrees=self.in_degrees.to(device),
            out_degrees=self.out_degrees.to(device),
            message_order=self.unchanged_order.to(device),
        )


@dataclass(frozen=True)
class NodeSet:
    """The nodes on one side of a graph, by type; tensors are (N_type,) int64."""

    ids: dict[str, Tensor]  # global IDs of this worker's nodes, in the order of its rows
    rows: dict[str, Tensor]  # their indices among the partition's nodes of the type
    counts_global: dict[str, int]  # number of nodes on all workers

    @property
    def counts(self) -> dict[str, int]:
        return {ntype: len(ids) for ntype, ids in self.ids.items()}

    @lasting
    def to(self, device: torch.device) -> "NodeSet":
        ids, rows = ({ntype: column.to(device) for ntype, column in x.items()} for x in (self.ids, self.rows))
        return replace(self, ids=ids, rows=rows)


class GraphLibrary(NamedTuple):
    """The library whose graphs a distributed graph replaces, such as DGL. The engine imports none itself."""

    sampling_graph: "Callable[[Structure], Any]"  # builds a graph of the library from a worker's edges and their ends
    missing_method: Callable[[str], MissingMethodError]  # the error for a method that only the library's graphs have


@dataclass(frozen=True)
class Structure:
    """All relations of a graph, and the distribution of its nodes over the partitions."""

    group: Group
    device: torch.device
    node_ranges: list[tuple[int, int]]  # [start, end) of global node IDs of every partition
    src: NodeSet
    dst: NodeSet  # the same, except on message flow graphs
    relations: list[Relation]
    signature: str  # equal on workers that hold parts of the same graph
    library: "GraphLibrary | None" = None
    original_ids: Tensor | None = None  # this worker's nodes' IDs in the input graph, counted within types, (N_i,)

    def __post_init__(self) -> None:
        counts = [*self.src.counts.values(), *self.dst.counts.values()]
        edges = [relation.num_edges for relation in self.relations]
        self.group.own_sizes.update(counts, edges, (sum(counts), sum(edges)))

    @cached_property
    def is_block(self) -> bool:
        return self.src is not self.dst

    @property
    def nbytes(self) -> int:
        """Bytes of the structure on this worker, with the caches of its relations."""
        sides = [self.src, self.dst] if self.is_block else [self.src]
        nodes = [tensor for side in sides for tensor in (*side.ids.values(), *side.rows.values())]
        return sum(tensor.nbytes for tensor in nodes) + sum(relation.nbytes for relation in self.relations)

    @cached_property
    @lasting
    def sampling_graph(self) -> Any:
        """This worker's edges and their ends as a graph of `library`; cached."""
        if self.library is None or self.is_block or self.device.type == "meta":
            raise GraphError(
                "Message flow graphs and plans have no sampling_graph; take that of `construct_full_graph(data)`."
            )
        return self.library.sampling_graph(self)

    def with_relations(self, relations: list[Relation], how: str) -> "Structure":
        """The structure with other edges. `how` describes the change, and becomes part of the signature."""
        counts = [relation.num_edges_global for relation in relations]
        return replace(self, relations=relations, signature=digest(f"{self.signature} {how} {counts}"))

    @lasting
    def to(self, device: torch.device) -> "Structure":
        src = self.src.to(device)
        dst = self.dst.to(device) if self.is_block else src
        relations = [relation.to(device) for relation in self.relations]
        return replace(self, device=device, src=src, dst=dst, relations=relations)


def digest(text: str) -> str:
    """A short hash of a text."""
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
