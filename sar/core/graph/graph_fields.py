"""The fields of a graph, under the names by which DGL reaches them."""

from collections.abc import Iterator
from contextlib import contextmanager

from sar.core.empty import views_of_nothing
from sar.core.graph.frames import Fields, Frame, Frames, TypeView, fields_of
from sar.core.graph.queries import GraphQueries
from sar.core.relation import Relation, Structure
from sar.errors import GraphError


class GraphFields(GraphQueries):
    """Fields of this worker's nodes and of the edges into them."""

    def __init__(self, structure: Structure, relations: list[Relation], frames: Frames) -> None:
        super().__init__(structure, relations)
        self._frames = frames

    @property
    def srcdata(self) -> Fields:
        """Fields of the source nodes; the same frame as `dstdata` where sources are destinations."""
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

        `_ID` (`dgl.EID`) are the partitioning's edge IDs, on message flow graphs and sampling graphs too. `orig_id` are
        those of the input graph, counted within each edge type, where the data has them; otherwise the maps that
        `dgl.distributed.partition_graph(..., return_mapping=True)` returns give them, at
        `partition_book.map_to_per_etype(ids)[1]`. The same goes for nodes, with `_ID` and `orig_id` in
        `PartitionData.node_features` and `map_to_per_ntype`.
        """
        return fields_of(self._frames.edge, self.canonical_etypes)

    @property
    def nodes(self) -> TypeView:
        """`g.nodes[ntype].data` is the frame of a node type; `g.nodes(ntype)` are this worker's local IDs."""
        return TypeView(self._node_frames, lambda ntype: self._ntypes_of(ntype, self.ntypes))

    @property
    def srcnodes(self) -> TypeView:
        """As `nodes`, of source types."""
        return TypeView(self._frames.src, lambda ntype: self._ntypes_of(ntype, self.srctypes))

    @property
    def dstnodes(self) -> TypeView:
        """As `nodes`, of destination types."""
        return TypeView(self._frames.dst, lambda ntype: self._ntypes_of(ntype, self.dsttypes))

    @property
    def edges(self) -> TypeView:
        """`g.edges[etype].data` is the frame of an edge type."""
        return TypeView(self._frames.edge, lambda etype: [self._relation(etype).etype])

    @contextmanager
    def local_scope(self) -> Iterator[None]:
        """Undo at the end what is set on the graph inside, also when an exception passes.

        An exception raised inside reaches all other workers as a `PeerError`, because they may be waiting for this one.
        """
        frames = self._frames
        fewest = min(self.num_src_nodes(), self.num_dst_nodes(), self.num_edges())
        self._frames = frames.clone()
        try:
            with self._structure.group.guard(), views_of_nothing(fewest):
                yield
        finally:
            self._frames = frames

    @property
    def _node_frames(self) -> dict[str, Frame]:
        if self.is_block:
            raise GraphError("On a message flow graph sources and destinations differ; use srcdata or dstdata.")
        return self._frames.dst
