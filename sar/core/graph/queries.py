"""Types, counts, degrees, IDs and fields of a graph, under DGL's names."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from sar.common_tuples import AnyEtype, CanonicalEtype
from sar.core.graph.frames import Fields, Frame, Frames, TypeView, fields_of
from sar.core.modules import views_of_nothing
from sar.core.relation import NodeSet, Relation, Structure
from sar.errors import FieldError, GraphError, MissingMethodError

ALL = "__ALL__"


@dataclass(eq=False, repr=False)
class EdgeTypeView(TypeView):
    """The type of `g.edges`: `g.edges[etype].data` is a frame."""

    _missing: Callable[[str], Exception]

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise for DGL's `g.edges()`, the ends of all edges, which no worker has."""
        raise self._missing("edges")


class GraphQueries:
    """Types, counts, degrees and fields of this worker's part of a graph, or of some of its relations.

    Counts are local: nodes of this worker, edges into it. Names that end in `_global` count the whole graph. Returned
    tensors and lists are copies, which the caller may change, except for fields.

    Attributes:
        device: the device of the structure and the fields.
        is_block: whether sources and destinations differ, as on message flow graphs.
    """

    batch_size = 1
    idtype = torch.int64
    """The dtype of node and edge IDs."""

    def __init__(
        self, structure: Structure, relations: list[Relation], frames: Frames, partition_book: Any = None
    ) -> None:
        self._structure = structure
        self._relations = {relation.etype: relation for relation in relations}
        self._frames = frames
        self.partition_book = partition_book
        self.device = structure.device
        self.is_block = structure.is_block

    if not TYPE_CHECKING:  # type checkers should report unknown attributes

        def __getattr__(self, name: str) -> NoReturn:
            raise self._missing(name)

    def _missing(self, name: str) -> MissingMethodError:
        structure: Structure | None = vars(self).get("_structure")  # None while a copy is under construction
        if structure is None or structure.library is None:
            return MissingMethodError(f"A distributed graph has no attribute {name!r}.")
        return structure.library.missing_method(name)

    # -- types

    @property
    def canonical_etypes(self) -> list[CanonicalEtype]:
        """(source type, relation, destination type) of every edge type."""
        return list(self._relations)

    @property
    def etypes(self) -> list[str]:
        """The relation name of every edge type."""
        return [etype[1] for etype in self._relations]

    @property
    def srctypes(self) -> list[str]:
        """Node types on the source side, as in DGL: all, or if no type is on both sides, those without in-edges."""
        return [ntype for ntype in self._frames.src if ntype not in self._only_targets]

    @property
    def dsttypes(self) -> list[str]:
        """Node types on the destination side, as in DGL: all, or if no type is on both sides, those with in-edges."""
        return [ntype for ntype in self._frames.dst if not self._only_targets or ntype in self._only_targets]

    @property
    def ntypes(self) -> list[str]:
        """All node types; on the graph of one edge type, those that it joins."""
        return list(self._frames.src | self._frames.dst)

    @property
    def is_homogeneous(self) -> bool:
        """Whether there is one node type and one edge type."""
        return len(self.ntypes) == 1 and len(self._relations) == 1

    @property
    def _only_targets(self) -> set[str]:
        """Destination types if none of them is a source type; otherwise, and on message flow graphs, empty."""
        targets = {etype[2] for etype in self._relations}
        return set() if self.is_block or any(etype[0] in targets for etype in self._relations) else targets

    def to_canonical_etype(self, etype: AnyEtype) -> CanonicalEtype:
        """The canonical edge type of a relation name or canonical type. `etype` may be None if there is only one.

        Raises:
            FieldError: if no relation or several relations have the name.
        """
        if isinstance(etype, tuple) and etype in self._relations:
            return etype
        if etype is None and len(self._relations) != 1:
            raise GraphError(f"The graph has {len(self._relations)} edge types; name one of {self.canonical_etypes}.")
        matches = [candidate for candidate in self._relations if etype in (candidate[1], None)]
        if len(matches) == 1:
            return matches[0]
        problem = f"stands for several edge types: {matches}" if matches else "is not an edge type of this graph"
        raise FieldError(f"{etype!r} {problem}; the edge types are {self.canonical_etypes}.")

    def _relation(self, etype: AnyEtype) -> Relation:
        return self._relations[self.to_canonical_etype(etype)]

    def _ntypes_of(self, ntype: str | None, ntypes: list[str]) -> list[str]:
        """The named type in a list, or all of `ntypes` if `ntype` is None."""
        if ntype is None:
            return ntypes
        if ntype not in ntypes:
            raise FieldError(f"There is no node type {ntype!r} here; expected one of {ntypes}.")
        return [ntype]

    # -- counts

    def num_nodes(self, ntype: str | None = None) -> int:
        """Number of this worker's nodes, of one type or all; on a message flow graph, sources plus destinations."""
        return sum(nodes.counts[t] for nodes, t in self._nodes_of(ntype))

    def num_src_nodes(self, ntype: str | None = None) -> int:
        """Number of this worker's source nodes, of one type or all."""
        return sum(self._structure.src.counts[t] for t in self._ntypes_of(ntype, self.srctypes))

    def num_dst_nodes(self, ntype: str | None = None) -> int:
        """Number of this worker's destination nodes, of one type or all."""
        return sum(self._structure.dst.counts[t] for t in self._ntypes_of(ntype, self.dsttypes))

    def num_edges(self, etype: AnyEtype = None) -> int:
        """Number of edges into this worker, of one type or all."""
        return sum(relation.num_edges for relation in self._relations_of(etype))

    def num_nodes_global(self, ntype: str | None = None) -> int:
        """Number of nodes of the whole graph; otherwise like `num_nodes`."""
        self._structure.group.has_summed = True  # a loss may be divided by it
        return sum(nodes.counts_global[t] for nodes, t in self._nodes_of(ntype))

    def num_edges_global(self, etype: AnyEtype = None) -> int:
        """Number of edges of the whole graph, of one type or all."""
        self._structure.group.has_summed = True
        return sum(relation.num_edges_global for relation in self._relations_of(etype))

    def _nodes_of(self, ntype: str | None) -> list[tuple[NodeSet, str]]:
        """Pairs of a node set and a node type, for the named type or all."""
        sides = [(self._structure.src, self._frames.src)] if self.is_block else []
        sides.append((self._structure.dst, self._frames.dst))
        types = self._ntypes_of(ntype, self.ntypes)
        return [(nodes, t) for nodes, frames in sides for t in types if t in frames]

    def _relations_of(self, etype: AnyEtype) -> list[Relation]:
        return list(self._relations.values()) if etype is None else [self._relation(etype)]

    # DGL's older names.
    number_of_nodes = num_nodes
    number_of_src_nodes = num_src_nodes
    number_of_dst_nodes = num_dst_nodes
    number_of_edges = num_edges

    def batch_num_nodes(self, ntype: str | None = None) -> Tensor:
        """Number of this worker's nodes, (1,) int64, as if they were a batch of one graph."""
        return torch.tensor([self.num_nodes(ntype)], device=self.device)

    # -- degrees

    def in_degrees(self, v: Any = ALL, etype: AnyEtype = None) -> Tensor:
        """In-degrees of this worker's nodes, (N_dst,) int64, or of the local IDs `v` only."""
        return _rows(self._relation(etype).in_degrees, v)

    def out_degrees(self, u: Any = ALL, etype: AnyEtype = None) -> Tensor:
        """Out-degrees of this worker's nodes, (N_src,) int64, or of the local IDs `u`, with edges into all workers."""
        return _rows(self._relation(etype).out_degrees, u)

    # -- node IDs and devices

    @property
    def seeds(self) -> Any:
        """The destinations, in the order of their rows.

        Returns:
            Global IDs, (N_dst,) int64. With several node types, a dictionary like that of `input_nodes`, from each
            destination type to rows of the partition's nodes: `data.node_features["paper/label"][g.seeds["paper"]]`
            are labels.
        """
        dst = self._structure.dst
        if len(dst.ids) > 1:
            return {t: dst.rows[t].clone() for t in self.dsttypes}
        return next(iter(dst.ids.values())).clone()

    @property
    def input_nodes(self) -> Any:
        """The sources, in the order of their rows, as indices of their features.

        Returns:
            Rows of this partition's nodes, (N_src,) int64. With several node types, a dictionary from each source type
            to rows of that type's nodes: `data.node_features["paper/feat"][g.input_nodes["paper"]]` are features.
        """
        src = self._structure.src
        if len(src.ids) > 1:
            return {t: src.rows[t].clone() for t in self.srctypes}
        return next(iter(src.rows.values())).clone()

    def node_ids(self, ntype: str | None = None) -> Tensor:
        """Global IDs of this worker's nodes, (N_i,) int64, in row order; on a message flow graph, of its `seeds`.

        Args:
            ntype: node type; optional if there is only one.
        """
        if ntype is None and len(self.ntypes) > 1:
            raise GraphError(f"The graph has several node types; name one of {self.ntypes}.")
        return self._structure.dst.ids[self._ntypes_of(ntype, self.ntypes)[0]].clone()

    def original_ids(self, ntype: str | None = None) -> Tensor | None:
        """IDs in the input graph of the nodes of `node_ids(ntype)`, counted per type; None if unknown.

        Args:
            ntype: node type; optional if there is only one.
        """
        original, (start, _) = self._structure.original_ids, self.node_ranges[self._structure.group.rank]
        rows = self.node_ids(ntype) - start
        return None if original is None else original[rows.to(original.device)].long()

    @property
    def node_ranges(self) -> list[tuple[int, int]]:
        """The [start, end) range of global node IDs of every partition."""
        return [*self._structure.node_ranges]

    # -- fields

    @property
    def srcdata(self) -> Fields:
        """Fields of the source nodes; the same frame as `dstdata`, except on message flow graphs."""
        return fields_of(self._frames.src, self.srctypes)

    @property
    def dstdata(self) -> Fields:
        """Fields of the destination nodes."""
        return fields_of(self._frames.dst, self.dsttypes)

    @property
    def ndata(self) -> Fields:
        """Fields of the nodes.

        Raises:
            GraphError: on message flow graphs, as in DGL.
        """
        return fields_of(self._node_frames, self.ntypes)

    @property
    def edata(self) -> Fields:
        """Fields of the edges in the visible order; at first the partition's edge features and edge IDs.

        `_ID` (`dgl.EID`) holds the partitioning's edge IDs, also on message flow graphs and sampling graphs. `orig_id`
        holds the IDs of the input graph, counted per edge type, if known. Otherwise index the maps that
        `dgl.distributed.partition_graph(..., return_mapping=True)` returns with
        `partition_book.map_to_per_etype(ids)[1]`. The same holds for nodes, with `_ID` and `orig_id` in
        `PartitionData.node_features`, and `map_to_per_ntype`.
        """
        return fields_of(self._frames.edge, self.canonical_etypes)

    @property
    def nodes(self) -> TypeView:
        """View of nodes by type: `g.nodes[ntype].data` is a frame, and `g.nodes(ntype)` are this worker's local IDs."""
        return TypeView(self._node_frames, lambda ntype: self._ntypes_of(ntype, self.ntypes))

    @property
    def srcnodes(self) -> TypeView:
        """Like `nodes`, for source types."""
        return TypeView(self._frames.src, lambda ntype: self._ntypes_of(ntype, self.srctypes))

    @property
    def dstnodes(self) -> TypeView:
        """Like `nodes`, for destination types."""
        return TypeView(self._frames.dst, lambda ntype: self._ntypes_of(ntype, self.dsttypes))

    @property
    def edges(self) -> EdgeTypeView:
        """View of edge fields by type: `g.edges[etype].data` is the frame of an edge type."""
        return EdgeTypeView(self._frames.edge, lambda etype: [self._relation(etype).etype], self._missing)

    @contextmanager
    def local_scope(self) -> Iterator[None]:
        """Context in which fields are set temporarily. They are restored at the end, even after an exception.

        An exception raised inside reaches all other workers as a `PeerError`, because they may be waiting for this one.
        """
        frames = self._frames
        self._frames = frames.clone()
        try:
            with self._structure.group.guard(), views_of_nothing(self.num_edges()):
                yield
        finally:
            self._frames = frames

    @property
    def _node_frames(self) -> dict[str, Frame]:
        if self.is_block:
            raise GraphError("On a message flow graph sources and destinations differ; use srcdata or dstdata.")
        return self._frames.dst


def _rows(degrees: Tensor, which: Any) -> Tensor:
    if isinstance(which, str) and which == ALL:
        return degrees.clone()
    rows = torch.as_tensor(which, device=degrees.device)
    outside = rows[(rows < 0) | (rows >= len(degrees))] if rows.dtype != torch.bool else rows[:0]
    if outside.numel():
        raise GraphError(f"There is no node {int(outside[0])} here; expected local IDs from 0 to {len(degrees) - 1}.")
    return degrees[rows]
