"""The `edge_index` of a graph that spans all workers, which PyTorch Geometric's layers and functions take as it is.

[Note: numbers of nodes]
An edge index holds the edges into this worker's nodes, (2, E). Destinations are numbered as the rows of the worker's
nodes. So are sources that are its own; those of other workers count on from there, partition by partition. Most of what
is done with an edge index is then right as it stands: a self-loop has two equal ends, and in-degrees and sums or
softmaxes over in-edges concern this worker alone. What is left are values of sources, `x[edge_index[0]]`, which are
fetched, and sums of edge values at sources, which are sent. These operations are replaced
(`torch.Tensor.__torch_function__`). Any other operation on source numbers raises: its result might be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sar.adapters.pyg.guarded import GuardedTensor, Handlers, handler_for, plain
from sar.adapters.pyg.numbering import Numbering
from sar.core.eager import uncompiled
from sar.core.graph.frames import Frame
from sar.core.graph.graph import GraphShardManager
from sar.core.graph.reversed_graph import reversed_graph
from sar.core.passing.exponentials import by_head
from sar.core.passing.reverse import max_at_sources, sum_at_sources
from sar.errors import GraphError


def edges_of(graph: GraphShardManager) -> DistributedEdgeIndex:
    """The edge index of all edges of a graph with one edge type."""
    numbering = Numbering(graph)
    blocks, starts = numbering.relation.blocks, numbering.starts
    src = torch.cat([block.cols.long() + start for block, start in zip(blocks, starts, strict=True)])
    dst = torch.cat([block.destinations(0, block.num_edges) for block in blocks])
    index = DistributedEdgeIndex.of(torch.stack([src, dst]), numbering, numbering.relation.num_dst)
    index.__dict__["passes"] = (graph, None)  # this very graph, in its own order
    return index


_HANDLERS: Handlers = {}


class _Ids(GuardedTensor):
    """A tensor of node numbers."""

    numbering: Numbering
    handlers = _HANDLERS
    what = "sources of a distributed edge_index, which have numbers of their own on each worker"
    advice = "Do it before the graph is partitioned, or leave it out."

    @classmethod
    def numbered(cls, numbers: Tensor, numbering: Numbering) -> Any:
        """The numbers as such a tensor; shares their memory."""
        ids = cls.over(numbers)
        ids.numbering = numbering
        return ids


class SourceIndex(_Ids):
    """The first row of an edge index, (E,): indexes values of nodes, wherever these are.

    Attributes:
        edges: the edges, of which these are the sources.
        along: the dimension that counts edges, where `scatter` has expanded this to the shape of its values.
    """

    edges: DistributedEdgeIndex
    along: int | None

    @classmethod
    def of(cls, edges: DistributedEdgeIndex) -> SourceIndex:
        index: SourceIndex = cls.numbered(edges.plain[0], edges.numbering)
        index.edges, index.along = edges, None
        return index


class DistributedEdgeIndex(_Ids):
    """The edges into this worker's nodes, (2, E); see [Note: numbers of nodes].

    Attributes:
        num_dst: destinations.
    """

    num_dst: int

    @classmethod
    def of(cls, ends: Tensor, numbering: Numbering, num_dst: int) -> DistributedEdgeIndex:
        index: DistributedEdgeIndex = cls.numbered(ends, numbering)
        index.num_dst = num_dst
        return index

    @property
    def graph(self) -> GraphShardManager:
        """The distributed graph whose edges these are, or are a part of, along one edge type; to sample from, say."""
        return self.numbering.graph

    @cached_property
    def passes(self) -> tuple[GraphShardManager, Tensor | None]:
        """The graph of these edges; and of its edges the columns here, (E,), None where the order is the same."""
        return self.numbering.select(self.plain, self.num_dst)

    @property
    def reversed(self) -> DistributedEdgeIndex:
        """All edges the other way around, in an order of their own; made at the first use. A collective call."""
        if self.passes[0] is not self.numbering.graph:
            raise _refuse("The reverse of a part")
        if "_reversed" not in self.__dict__:  # a `cached_property` would keep a lock: see `Numbering.joined`
            self._reversed = edges_of(reversed_graph(self.numbering.graph))
        return self._reversed

    def in_graph_order(self, values: Tensor) -> Tensor:
        """Values of the columns, (E, ...), as values of the graph's edges."""
        order = self.passes[1]
        return values if order is None else values.index_select(0, order)

    def in_column_order(self, values: Tensor) -> Tensor:
        """Values of the graph's edges, (E, ...), as values of the columns."""
        order = self.passes[1]
        return values if order is None else torch.empty_like(values).index_copy(0, order, values)

    @uncompiled
    def at_edges(self, values: Tensor) -> Tensor:
        """The row of each column's source, (E, ...), of values of this worker's nodes, (N_src, ...)."""
        graph, _ = self.passes
        if len(values) != self.numbering.relation.num_src:
            raise GraphError(
                f"Values of shape {tuple(values.shape)} are indexed with the sources of a distributed edge_index; "
                f"expected a row for each of this worker's {self.numbering.relation.num_src} nodes."
            )
        passing = graph.passing()
        with graph._structure.group.guard():
            if values.is_floating_point():
                rows = passing.copy_to_edges(values.contiguous())
            else:
                frame = Frame(len(values), values.device, "sources", {"x": values})
                rows = replace(passing, src=frame).apply_edges(lambda edges: {"x": edges.src["x"]})["x"]
        return self.in_column_order(rows)

    @uncompiled
    def at_sources(self, values: Tensor) -> Tensor:
        """The sum of the values of each node's out-edges, whatever worker these go to: (E, ...) to (N_src, ...)."""
        return sum_at_sources(self.passes[0], self.in_graph_order(values).contiguous())


class Incidence(DistributedEdgeIndex):
    """Which nodes are in which hyperedges: these are the destinations, and messages go back to the nodes, too."""


class Turned(NamedTuple):
    """An incidence with its rows exchanged: messages go from destinations to sources, and are summed there."""

    edges: Incidence

    def sums(self, message: Callable[..., Tensor], x: Tensor, norm: Tensor, alpha: Tensor | None) -> Tensor:
        """What HypergraphConv's `propagate` makes of values of hyperedges and a norm of nodes, (N_src, ...)."""
        members = SourceIndex.of(self.edges)
        return self.edges.at_sources(message(x_j=x[self.edges.plain[1]], norm_i=norm[members], alpha=alpha))


class JoinedEdgeIndex(DistributedEdgeIndex):
    """The edges of several types behind one another, each between nodes of its own, which are counted on.

    Attributes:
        parts: the edges of each type, and what is added to the numbers of its sources and of its destinations.
    """

    parts: list[tuple[DistributedEdgeIndex, int, int]]

    @classmethod
    def join(cls, parts: list[tuple[DistributedEdgeIndex, int, int]]) -> JoinedEdgeIndex:
        """The edge index of these parts."""
        ends = [edges.plain + torch.tensor([[src], [dst]], device=edges.plain.device) for edges, src, dst in parts]
        joined: JoinedEdgeIndex = cls.numbered(torch.cat(ends, 1), parts[0][0].numbering)
        joined.parts = parts
        return joined

    @property
    def passes(self) -> tuple[GraphShardManager, Tensor | None]:
        raise _refuse("Passing messages along several types")

    def at_edges(self, values: Tensor) -> Tensor:
        """The row of each column's source, of the rows of all types' sources behind one another."""
        ends = [(edges, start, start + edges.numbering.relation.num_src) for edges, start, _ in self.parts]
        return torch.cat([edges.at_edges(values[start:end]) for edges, start, end in ends])


# -- operations

_handles = partial(handler_for, _HANDLERS)


def _refuse(what: str) -> GraphError:
    return GraphError(
        f"{what} of a distributed edge_index is not known to be right across workers. Do it before the graph is "
        "partitioned, or leave it out."
    )


@_handles(Tensor.__repr__)
def _repr(value: Tensor, **_: Any) -> str:
    return f"{type(value).__name__}({plain(value)!r})"


@_handles(Tensor.clone, Tensor.contiguous, Tensor.detach, Tensor.long, torch.clone)
def _same(value: Tensor, **_: Any) -> Tensor:
    return value  # nothing here changes node numbers in place


@_handles(Tensor.to, Tensor.cpu, Tensor.cuda)
def _to(value: _Ids, *args: Any, **kwargs: Any) -> Any:
    moved = plain(value).to(*args, **kwargs)
    if moved.device != value.device:
        raise GraphError(
            f"edge_index is on {value.device}, as its graph; call graph.to(device), then sar.pyg.edge_index."
        )
    return value if moved.dtype == torch.int64 else moved


@_handles(Tensor.__getitem__)
def _getitem(value: Tensor, index: Any) -> Any:
    if isinstance(value, DistributedEdgeIndex):
        return _part_of_edges(value, index)
    if isinstance(value, SourceIndex):
        return _part_of_sources(value, index)
    parts = index if isinstance(index, tuple) else (index,)
    place = next(i for i, part in enumerate(parts) if isinstance(part, _Ids))
    rest = [part for i, part in enumerate(parts) if i != place]
    if not isinstance(parts[place], SourceIndex) or not all(part == slice(None) for part in rest):
        raise _refuse("Indexing with this part")
    return _select(value, place, parts[place])


def _part_of_edges(edges: DistributedEdgeIndex, index: Any) -> Any:
    rows, columns = index if isinstance(index, tuple) else (index, slice(None))
    if isinstance(rows, int) and rows in (0, 1, -1, -2):
        row = SourceIndex.of(edges) if rows in (0, -2) else plain(edges)[1]
        return row if isinstance(columns, slice) and columns == slice(None) else row[columns]
    if not (isinstance(rows, slice) and rows == slice(None)):
        raise _refuse(f"The part [{index}]")
    return DistributedEdgeIndex.of(plain(edges)[:, columns], edges.numbering, edges.num_dst)


def _part_of_sources(sources: SourceIndex, index: Any) -> SourceIndex:
    """The sources of some edges, as those of a graph in which each edge has a destination of its own."""
    return _sources(plain(sources)[index], sources.numbering)


def _sources(numbers: Tensor, numbering: Numbering) -> SourceIndex:
    ends = torch.stack([numbers, torch.arange(len(numbers), device=numbers.device)])
    return SourceIndex.of(DistributedEdgeIndex.of(ends, numbering, len(numbers)))


@_handles(Tensor.unbind, torch.unbind)
def _unbind(edges: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    if not isinstance(edges, DistributedEdgeIndex) or dim != 0:
        raise _refuse(f"unbind along {dim}")
    return SourceIndex.of(edges), plain(edges)[1]


@_handles(Tensor.__iter__)
def _iter(edges: Tensor) -> Any:
    return iter(_unbind(edges))


@_handles(Tensor.index_select, torch.index_select)
def _select(value: Tensor, dim: int, index: Tensor) -> Any:
    if isinstance(value, DistributedEdgeIndex):
        return _part_of_edges(value, (slice(None), index) if dim in (1, -1) else (index, slice(None)))
    if isinstance(value, SourceIndex):
        return _part_of_sources(value, index)
    if not isinstance(index, SourceIndex) or index.along is not None:
        raise _refuse("Selecting with this part")
    return index.edges.at_edges(value.movedim(dim, 0)).movedim(0, dim)


@_handles(Tensor.__setitem__)
def _setitem(value: Tensor, index: Any, new: Any) -> None:
    """Right where the sources are this worker's own, as those of self-loops are."""
    sources = plain(index)
    if isinstance(value, _Ids) or not isinstance(index, SourceIndex) or bool((sources >= len(value)).any()):
        raise _refuse("Setting values at sources")
    value[sources] = new


@_handles(Tensor.flip)
def _flip(edges: Tensor, dims: Any) -> Turned:
    if not isinstance(edges, Incidence) or tuple(dims) != (0,):
        raise _refuse("flip")
    return Turned(edges)


@_handles(torch.cat, torch.concat, torch.concatenate)
def _cat(values: Sequence[Tensor], dim: int = 0) -> Any:
    ours = [value for value in values if isinstance(value, _Ids)]
    numbering = ours[0].numbering
    numbers = [plain(value) for value in values]
    if any(value.numbering is not numbering for value in ours):
        raise _refuse("cat with edges of another type")
    if isinstance(ours[0], DistributedEdgeIndex) and dim in (1, -1):
        return DistributedEdgeIndex.of(torch.cat(numbers, 1), numbering, ours[0].num_dst)
    if isinstance(ours[0], SourceIndex):
        return _sources(torch.cat(numbers), numbering)
    raise _refuse(f"cat along {dim}")


@_handles(torch.stack)
def _stack(values: Sequence[Tensor], dim: int = 0) -> Any:
    first = values[0]
    if len(values) != 2 or dim != 0 or not isinstance(first, SourceIndex) or isinstance(values[1], _Ids):
        raise _refuse("This stack")
    ends = torch.stack([plain(first), values[1]])
    return DistributedEdgeIndex.of(ends, first.numbering, first.numbering.relation.num_dst)


@_handles(Tensor.max, torch.max)
def _greatest(value: _Ids) -> Tensor:
    """One less than the number of nodes: that is what it is asked for."""
    relation = value.numbering.relation
    both = max(relation.num_src, relation.num_dst) if isinstance(value, DistributedEdgeIndex) else relation.num_src
    return torch.tensor(both - 1)


@_handles(Tensor.view, Tensor.reshape, Tensor.expand_as, Tensor.expand)
def _expand(index: Tensor, *shape: Any) -> Any:
    """What `scatter` does to its index: one dimension counts edges, the others are repeated."""
    sizes = shape[0].shape if isinstance(shape[0], Tensor) else shape[0] if len(shape) == 1 else shape
    if not isinstance(index, SourceIndex):
        raise _refuse("view")
    along = index.along
    if along is None:
        found = [dim for dim, size in enumerate(sizes) if size == -1 or len(sizes) == 1]
        along = found[0] if len(found) == 1 else len(sizes)
    if along == len(sizes) or sizes[along] not in (-1, len(index)):
        raise _refuse(f"A view of shape {tuple(sizes)}")
    same = SourceIndex.of(index.edges)
    same.along = None if len(sizes) == 1 else along
    return same


@_handles(Tensor.scatter_add, torch.scatter_add)
def _scatter_add(out: Tensor, dim: int, index: SourceIndex, values: Tensor) -> Tensor:
    if not isinstance(index, SourceIndex) or (dim % out.dim()) != (index.along or 0):
        raise _refuse("scatter_add")
    total: Tensor = index.edges.at_sources(values.movedim(dim, 0))
    return out + total.movedim(0, dim)


@_handles(Tensor.scatter_add_)
def _scatter_add_in_place(out: Tensor, dim: int, index: SourceIndex, values: Tensor) -> Tensor:
    return out.copy_(_scatter_add(out, dim, index, values))


@_handles(Tensor.scatter_reduce_)
def _scatter_greatest(
    out: Tensor, dim: int, index: SourceIndex, values: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """The maximum that `softmax` subtracts."""
    right = isinstance(index, SourceIndex) and (dim % out.dim()) == (index.along or 0) == 0
    if not right or reduce != "amax" or include_self or values.requires_grad:
        raise _refuse(f"scatter_reduce by {reduce}")
    rows = by_head(index.edges.in_graph_order(values))
    # The last column says which sources have edges at all.
    greatest = max_at_sources(index.edges.passes[0], torch.cat([rows, rows.new_ones(len(rows), 1)], 1))
    return out.copy_(greatest[:, :-1].masked_fill(greatest[:, -1:] == -torch.inf, 0).view_as(out))
