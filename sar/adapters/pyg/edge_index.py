"""The `edge_index` of a graph that spans all workers, for PyTorch Geometric's own layers and functions.

[Note: numbers of nodes]
An edge index holds the edges into this worker's nodes, (2, E). Destinations and own sources are row numbers of this
worker's nodes. Sources on other workers get the numbers after these, partition by partition. Most operations on an edge
index then need no change: a self-loop has two equal ends, and in-degrees, sums and softmaxes over in-edges are local.
Two kinds are replaced (`torch.Tensor.__torch_function__`): values of sources, `x[edge_index[0]]`, are fetched, and sums
of edge values at sources are sent. Any other operation on source numbers raises, because its result might be wrong.
This includes operations with plain numbers, which may be meant as node IDs: sources are only compared with the
destinations of the same edges, and only self-loops of all of this worker's nodes can be added. The maximum, however, is
this worker's number of nodes minus one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from sar.adapters.pyg.guarded import GuardedTensor, Handlers
from sar.core.collective import uncompiled
from sar.core.graph.edges import in_edges
from sar.core.graph.frames import Frame
from sar.core.graph.graph import GraphShardManager
from sar.core.passing.at_sources import sum_at_sources
from sar.core.passing.messages import copy_to_edges
from sar.core.passing.python_messages import run_python
from sar.errors import GraphError
from sar.kernels import EdgeBlock
from sar.nn.rows import pair_graph
from sar.tensors.lasting import lasting

KEPT = 4  # limit on the edges of all selections that a graph keeps, in multiples of its own edges


class Numbering:
    """The numbers of the sources of a graph with one edge type; see [Note: numbers of nodes]."""

    def __init__(self, graph: GraphShardManager) -> None:
        self.graph = graph
        self.relation = graph.call_context().relation
        self.part = graph._structure.group.rank
        # The number of the first source in each other partition, and the end; 0 for this worker's partition.
        self.bounds = list(accumulate(map(len, self.relation.halos), initial=self.relation.num_src))
        self.starts = [0 if part == self.part else start for part, start in enumerate(self.bounds[:-1])]
        self._selected: list[tuple[Tensor, int, GraphShardManager, Tensor]] = []

    @property
    def has_loops(self) -> bool:
        """Whether equal numbers of a source and a destination mean the same node."""
        (source, _, target), nodes = self.relation.etype, self.graph._structure
        if source != target or nodes.src is nodes.dst:
            return source == target
        return torch.equal(nodes.src.ids[source][: self.relation.num_dst], nodes.dst.ids[source])

    @property
    def loops(self) -> Tensor:
        """A self-loop of each of this worker's nodes, (2, N_i); none between different node types."""
        count = min(self.relation.num_src, self.relation.num_dst) if self.has_loops else 0
        return torch.arange(count, device=self.graph.device).expand(2, -1)

    def select(self, ends: Tensor, num_dst: int) -> tuple[GraphShardManager, Tensor]:
        """Return a graph with other edges between the same nodes, and the column in `ends` of each edge, (E,).

        `ends` are (2, E) numbers of sources and rows of destinations, which need not be nodes. Layers recreate the same
        edges in every call, so the latest graphs are cached, up to `KEPT` times the graph's edges.
        """
        for i, (known, count, graph, order) in enumerate(self._selected):
            if count == num_dst and torch.equal(known, ends):
                self._selected.append(self._selected.pop(i))
                return graph, order
        graph, order = self._make(ends[0], ends[1], num_dst)
        self._selected.append((lasting(ends.clone)(), num_dst, graph, order))
        while len(self._selected) > 1 and sum(len(kept[3]) for kept in self._selected) > KEPT * self.relation.num_edges:
            del self._selected[0]
        return graph, order

    @lasting
    def _make(self, src: Tensor, dst: Tensor, num_dst: int) -> tuple[GraphShardManager, Tensor]:
        old = self.relation
        if len(dst) and not 0 <= int(dst.min()) <= int(dst.max()) < num_dst:
            found = f"{int(dst.min())} to {int(dst.max())}"
            raise GraphError(
                f"A distributed edge_index got destinations {found}; expected numbers of this worker's {num_dst} nodes."
            )
        parts = torch.bucketize(src, torch.tensor(self.bounds, device=src.device), right=True) - 1
        parts = torch.where(src < old.num_src, self.part, parts)
        order = torch.argsort(parts * num_dst + dst, stable=True)
        counts = torch.bincount(parts, minlength=len(old.blocks)).tolist()
        blocks, offset = [], 0
        for part, count in enumerate(counts):
            rows = order[offset : offset + count]
            cols = src[rows] - self.starts[part]
            num_src = old.blocks[part].num_src
            blocks.append(EdgeBlock.from_coo(cols, dst[rows], num_src, num_dst, edge_offset=offset))
            offset += count
        degrees = dst.bincount(minlength=num_dst)
        relation = replace(
            old, blocks=blocks, num_dst=num_dst, in_degrees=degrees, message_order=order, num_edges_global=-1
        )
        graph, frames = self.graph, self.graph._frames
        structure = graph._structure.with_relations([relation], "with edges of an edge index")
        edge_frames = {old.etype: Frame(len(src), graph.device, "columns of the edge index")}
        dst_frames = {**frames.dst, old.etype[2]: Frame(num_dst, graph.device, "destinations")}
        frames = replace(frames, src=dict(frames.src), dst=dst_frames, edge=edge_frames)
        return graph._with(structure, [relation], frames), order


@lasting
def reversed_graph(graph: GraphShardManager) -> GraphShardManager:
    """Return the graph with all edges reversed, without features. A collective call.

    Raises a GraphError for heterogeneous and message flow graphs.
    """
    if not graph.is_homogeneous or graph.is_block:
        raise GraphError("Only whole homogeneous graphs can be reversed.")
    [found] = in_edges(graph)
    made = pair_graph(graph, graph.node_ids().cpu()[found.rows()], found.src)[found.etype]
    return made.get_full_partition_graph() if graph.one_shot else made


@lasting
def edges_of(graph: GraphShardManager) -> DistributedEdgeIndex:
    """The edge index of all edges of a graph with one edge type."""
    numbering = Numbering(graph)
    relation, blocks = numbering.relation, numbering.relation.blocks
    src = relation.in_edge_order(
        [block.cols.long() + start for block, start in zip(blocks, numbering.starts, strict=True)]
    )
    dst = relation.in_edge_order([block.destinations(0, block.num_edges) for block in blocks])
    index = DistributedEdgeIndex.of(torch.stack([src, dst]), numbering, relation.num_dst)
    index.__dict__["passes"] = (graph, None)  # this very graph, in its own order
    return index


class NodeNumbers(GuardedTensor):
    """A tensor of node numbers."""

    numbering: Numbering
    handlers: ClassVar[Handlers] = dict(GuardedTensor.handlers)  # operations.py adds more
    what = "sources of a distributed edge_index, which each worker numbers separately"
    advice = (
        "To add up values at sources, call torch_geometric.utils.scatter(values, edge_index[0], 0, num_nodes). Do "
        "other things before the graph is partitioned."
    )


class SourceIndex(NodeNumbers):
    """The first row of an edge index, (E,). It indexes values of the nodes of all workers."""

    edges: DistributedEdgeIndex  # the edges with these sources
    along: int | None  # the dimension of edges, if `scatter` has expanded this to the shape of its values

    @classmethod
    def of(cls, edges: DistributedEdgeIndex) -> SourceIndex:
        return cls.over(edges.plain[0], numbering=edges.numbering, edges=edges, along=None)


class DistributedEdgeIndex(NodeNumbers):
    """The edges into this worker's nodes, (2, E); see [Note: numbers of nodes]."""

    num_dst: int  # destinations

    def __getattr__(self, name: str) -> Any:
        why = "use a sparse adj_t before partitioning, and sar.DataLoader(data.graph, ...) in place of NeighborLoader"
        raise AttributeError(f"A distributed edge_index has no {name!r}; {why}.")

    @classmethod
    def of(cls, ends: Tensor, numbering: Numbering, num_dst: int) -> DistributedEdgeIndex:
        return cls.over(ends, numbering=numbering, num_dst=num_dst)

    @property
    def graph(self) -> GraphShardManager:
        """The distributed graph, with one edge type, that contains these edges; for example to sample from."""
        return self.numbering.graph

    @cached_property
    def passes(self) -> tuple[GraphShardManager, Tensor | None]:
        """The graph of exactly these edges, and the column of each edge, (E,); None if the order is the same."""
        return self.numbering.select(self.plain, self.num_dst)

    @property
    def sides(self) -> tuple[int, int]:
        """This worker's numbers of sources and destinations, which are the numbers of rows that layers receive."""
        if not self.plain.is_inference() and self.plain._version > 0:
            raise refuse("Changing the destinations in place, instead of a copy,")
        return self.numbering.relation.num_src, self.num_dst

    @property
    def reversed(self) -> DistributedEdgeIndex:
        """All edges reversed, in a different order; computed at first use. A collective call."""
        if self.passes[0] is not self.numbering.graph:
            raise refuse("The reverse of a part")
        if "_reversed" not in self.__dict__:  # a `cached_property` would keep a lock: see `Numbering.joined`
            self._reversed = edges_of(reversed_graph(self.numbering.graph))
        return self._reversed

    def in_graph_order(self, values: Tensor) -> Tensor:
        """Values of the columns, (E, ...), as values of the graph's edges."""
        order = self.passes[1]
        return values if order is None else values.index_select(0, order)

    @uncompiled
    def at_edges(self, values: Tensor) -> Tensor:
        """The row of each column's source, (E, ...), of values of this worker's nodes, (N_src, ...)."""
        check_rows("The sources index values of", len(values), self.sides[0])
        graph, order = self.passes
        context = graph.call_context()
        with graph._structure.group.guard():
            if values.is_floating_point():
                rows = copy_to_edges(context, values.contiguous())
            else:
                frame = Frame(len(values), values.device, "sources", {"x": values})
                fields = graph._edge_fields(context)._replace(src=frame)
                rows = run_python(context, lambda edges: {"x": edges.src["x"]}, fields, None, None)["x"]
        return rows if order is None else torch.empty_like(rows).index_copy(0, order, rows)

    @uncompiled
    def at_sources(self, values: Tensor) -> Tensor:
        """Sum the values of each node's out-edges to all workers: (E, ...) to (N_src, ...)."""
        check_rows("The sources add up values of", len(values), self.size(1), "edges")
        return sum_at_sources(self.passes[0].call_context(), self.in_graph_order(values).contiguous())


class JoinedEdgeIndex(DistributedEdgeIndex):
    """The edges of several types in sequence. Each type has its own nodes, numbered after those of earlier types."""

    # The edges of each type, and the first numbers of its sources and destinations.
    parts: list[tuple[DistributedEdgeIndex, int, int]]
    all_sides: tuple[int, int]

    @classmethod
    def join(cls, parts: list[tuple[DistributedEdgeIndex, int, int]], sides: tuple[int, int]) -> JoinedEdgeIndex:
        """The edge index of these parts, with the given total numbers of sources and destinations."""
        ends = [edges.plain + torch.tensor([[src], [dst]], device=edges.plain.device) for edges, src, dst in parts]
        numbering = parts[0][0].numbering
        return cls.over(torch.cat(ends, 1), numbering=numbering, parts=parts, all_sides=sides)

    @property
    def passes(self) -> tuple[GraphShardManager, Tensor | None]:
        raise refuse("Passing messages along several types")

    @property
    def sides(self) -> tuple[int, int]:
        return self.all_sides

    def at_edges(self, values: Tensor) -> Tensor:
        """The row of each column's source, from the concatenated rows of all types."""
        ends = [(edges, start, start + edges.numbering.relation.num_src) for edges, start, _ in self.parts]
        return torch.cat([edges.at_edges(values[start:end]) for edges, start, end in ends])


def refuse(what: str) -> GraphError:
    """The error of an operation that might be wrong across workers."""
    return GraphError(
        f"{what} of a distributed edge_index is not known to be right across workers. Do it before the graph is "
        "partitioned, or leave it out."
    )


def check_rows(what: str, found: int, expected: int, of: str = "nodes") -> None:
    """Raise a `GraphError` unless values have a row for each of this worker's nodes or edges."""
    if found != expected:
        wanted = f"expected a row for each of this worker's {expected} {of}"
        raise GraphError(f"{what} {found} rows on a distributed edge_index; {wanted}.")
