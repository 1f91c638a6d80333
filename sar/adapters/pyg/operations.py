"""Handlers for torch's operations on an edge index and its row of sources: see [Note: numbers of nodes]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sar.adapters.pyg.edge_index import (
    DistributedEdgeIndex,
    NodeNumbers,
    Numbering,
    SourceIndex,
    check_rows,
    refuse,
)
from sar.adapters.pyg.guarded import EQUALITY, GuardedTensor, plain, plainly
from sar.core.passing.at_sources import max_at_sources
from sar.core.passing.reducers import by_head
from sar.errors import ConfigError, GraphError


@NodeNumbers.handles(Tensor.view_as)
def _view_as(value: Tensor, other: Tensor) -> Tensor:
    """Hooks on a module's backward call it on all arguments."""
    if value is not other:
        raise refuse("view_as")
    return value


@NodeNumbers.handles(Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
def _set_requires_grad(value: Tensor, needed: bool) -> None:
    """Reentrant checkpointing sets this attribute."""
    if needed:
        raise refuse("A gradient")


@NodeNumbers.handles(Tensor.to, Tensor.cpu, Tensor.cuda)
def _to(value: NodeNumbers, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(value, NodeNumbers):
        raise refuse("The dtype")
    moved = plain(value).to(*args, **kwargs)
    if moved.device != value.device:
        raise GraphError(
            f"edge_index is on {value.device}, as its graph; call graph.to(device), then sar.pyg.edge_index."
        )
    if moved.dtype != torch.int64:
        raise refuse(f"A copy in {moved.dtype}")
    return value


@NodeNumbers.handles(*EQUALITY, told=True)
def _compare(func: Callable[..., Any], value: Any, other: Any) -> Any:
    """Whether each edge's ends are equal, or two rows of sources."""
    source, ends = (value, other) if isinstance(value, NodeNumbers) else (other, value)
    alike = isinstance(ends, type(source)) and ends.numbering is source.numbering
    if not alike and not _are_destinations(ends, source):
        raise refuse("Comparing plain numbers with those")
    return plainly(func, value, other)


def _are_destinations(ends: Any, sources: Tensor) -> bool:
    """Whether `ends` are the destinations of exactly the edges of `sources`."""
    is_plain = isinstance(ends, Tensor) and not isinstance(ends, GuardedTensor)
    if is_plain and ends.is_meta:
        raise ConfigError("`sar plan` cannot add self-loops to edges without values: plan with add_self_loops=False.")
    if not isinstance(sources, SourceIndex) or not is_plain or not ends.is_set_to(sources.edges.plain[1]):
        return False
    if not sources.numbering.has_loops:
        source, _, target = sources.numbering.relation.etype
        raise GraphError(
            f"The sources of a distributed edge_index, nodes of {source!r}, were compared with its destinations, nodes "
            f"of {target!r}, which are numbered separately. Call layers with add_self_loops=False on such edges."
        )
    return True


@NodeNumbers.handles(Tensor.__getitem__)
def _getitem(value: Tensor, index: Any) -> Any:
    if isinstance(value, DistributedEdgeIndex):
        return _part_of_edges(value, index)
    if isinstance(value, SourceIndex):
        return _part_of_sources(value, index)
    parts = index if isinstance(index, tuple) else (index,)
    place = next((i for i, part in enumerate(parts) if isinstance(part, SourceIndex)), None)
    if place is None or any(part is not parts[place] and not _is_all(part) for part in parts):
        raise refuse("Indexing with this part")
    return _select(value, place, parts[place])


def _is_all(part: Any) -> bool:
    return isinstance(part, slice) and part == slice(None)


def _part_of_edges(edges: DistributedEdgeIndex, index: Any) -> Any:
    rows, columns = index if isinstance(index, tuple) else (index, slice(None))
    if isinstance(rows, int) and rows in (0, 1, -1, -2):
        row = SourceIndex.of(edges) if rows in (0, -2) else plain(edges)[1]
        return row if _is_all(columns) else row[columns]
    part = plain(edges)[:, columns] if _is_all(rows) and not isinstance(columns, GuardedTensor) else None
    if part is None or part.dim() != 2:
        raise refuse(f"The part [{index}]")
    return DistributedEdgeIndex.of(part, edges.numbering, edges.num_dst)


def _part_of_sources(sources: SourceIndex, index: Any) -> SourceIndex:
    """The sources of some edges, as sources of a graph in which each edge has a separate destination."""
    if isinstance(index, GuardedTensor):
        raise refuse(f"The part [{index}]")
    return _sources(plain(sources)[index], sources.numbering)


def _sources(numbers: Tensor, numbering: Numbering) -> SourceIndex:
    if numbers.dim() != 1:
        raise refuse(f"A part of shape {tuple(numbers.shape)}")
    ends = torch.stack([numbers, torch.arange(len(numbers), device=numbers.device)])
    return SourceIndex.of(DistributedEdgeIndex.of(ends, numbering, len(numbers)))


@NodeNumbers.handles(Tensor.unbind, torch.unbind)
def _unbind(edges: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    if not isinstance(edges, DistributedEdgeIndex) or dim != 0:
        raise refuse(f"unbind along {dim}")
    return SourceIndex.of(edges), plain(edges)[1]


@NodeNumbers.handles(Tensor.__iter__)
def _iter(edges: Tensor) -> Any:
    return iter(_unbind(edges))


@NodeNumbers.handles(Tensor.index_select, torch.index_select)
def _select(value: Tensor, dim: int, index: Tensor) -> Any:
    if isinstance(value, DistributedEdgeIndex):
        return _part_of_edges(value, (slice(None), index) if dim in (1, -1) else (index, slice(None)))
    if isinstance(value, SourceIndex):
        return _part_of_sources(value, index)
    if not isinstance(index, SourceIndex) or index.along is not None:
        raise refuse("Selecting with this part")
    return index.edges.at_edges(value.movedim(dim, 0)).movedim(0, dim)


@NodeNumbers.handles(Tensor.__setitem__)
def _setitem(value: Tensor, index: Any, new: Any) -> None:
    """Assignment is right for sources on this worker, such as those of self-loops."""
    if isinstance(value, NodeNumbers) or not isinstance(index, SourceIndex) or isinstance(new, GuardedTensor):
        raise refuse("Setting values at sources")
    check_rows("Values are set at the sources of", len(value), index.edges.sides[0])
    if bool((plain(index) >= len(value)).any()):
        raise refuse("Setting values at sources that are other workers'")
    value[plain(index)] = new


@NodeNumbers.handles(torch.cat, torch.concat, torch.concatenate)
def _cat(values: Sequence[Tensor], dim: int = 0) -> Any:
    ours = [value for value in values if isinstance(value, NodeNumbers)]
    numbering = ours[0].numbering
    numbers = [plain(value) for value in values]
    if any(value.numbering is not numbering or type(value) is not type(ours[0]) for value in ours):
        raise refuse("cat with edges of another type")
    if isinstance(ours[0], DistributedEdgeIndex) and dim in (1, -1):
        loops = numbering.loops
        for value in values:
            if not isinstance(value, NodeNumbers) and not torch.equal(value, loops):
                found, expected = tuple(value.shape), tuple(loops.shape)
                raise refuse(
                    f"cat with plain numbers, {found}, except for self-loops of all of this worker's nodes, "
                    f"{expected}, which layers create from the rows of x (num_nodes), one per node,"
                )
        return DistributedEdgeIndex.of(torch.cat(numbers, 1), numbering, ours[0].num_dst)
    known = (isinstance(value, NodeNumbers) or any(_are_destinations(value, each) for each in ours) for value in values)
    if isinstance(ours[0], SourceIndex) and all(known):
        return _sources(torch.cat(numbers), numbering)
    raise refuse(f"cat along {dim}, or with plain numbers,")


@NodeNumbers.handles(torch.stack)
def _stack(values: Sequence[Tensor], dim: int = 0) -> Any:
    first = values[0]
    sides = len(values) == 2 and first.dim() == 1 and dim == 0
    if not sides or not isinstance(first, SourceIndex) or isinstance(values[1], GuardedTensor):
        raise refuse("This stack")
    ends = torch.stack([plain(first), values[1]])
    return DistributedEdgeIndex.of(ends, first.numbering, first.numbering.relation.num_dst)


@NodeNumbers.handles(Tensor.max, torch.max)
def _greatest(value: DistributedEdgeIndex | SourceIndex) -> Tensor:
    """This worker's number of nodes minus one, from which PyTorch Geometric infers the number of rows."""
    rows = value.edges.sides[0] if isinstance(value, SourceIndex) else max(value.sides)
    return torch.tensor(rows - 1, device="cpu")


@NodeNumbers.handles(Tensor.min)
def _least(_: NodeNumbers) -> Tensor:
    """The minimum, which PyTorch Geometric reads to explain an error; we raise that error if it is not negative."""
    return torch.tensor(0, device="cpu")


@NodeNumbers.handles(Tensor.numel, Tensor.nelement, torch.numel)
def _numel(value: NodeNumbers) -> int:
    """At least 1, because PyTorch Geometric treats graphs without edges as graphs without nodes."""
    return max(plain(value).numel(), 1)


@NodeNumbers.handles(Tensor.view, Tensor.reshape, Tensor.expand_as, Tensor.expand, told=True)
def _expand(func: Callable[..., Any], index: Tensor, *shape: Any) -> Any:
    """Expand as `scatter` does: one dimension counts edges, the others are repeated."""
    sizes = shape[0].shape if isinstance(shape[0], Tensor) else shape[0] if len(shape) == 1 else shape
    if not isinstance(index, SourceIndex):
        raise refuse("view")
    along = index.along
    if along is None:
        found = [dim for dim, size in enumerate(sizes) if size == -1 or len(sizes) == 1]
        along = found[0] if len(found) == 1 else len(sizes)
    if along == len(sizes) or sizes[along] not in (-1, len(index.edges.plain[0])):
        raise refuse(f"A view of shape {tuple(sizes)}")
    numbers, along = plainly(func, index, *shape), None if len(sizes) == 1 else along
    return SourceIndex.over(numbers, numbering=index.numbering, edges=index.edges, along=along)


@NodeNumbers.handles(Tensor.scatter_add, torch.scatter_add)
def _scatter_add(out: Tensor, dim: int, index: SourceIndex, values: Tensor) -> Tensor:
    if not isinstance(index, SourceIndex) or (dim % out.dim()) != (index.along or 0):
        raise refuse("scatter_add")
    check_rows("The sources add up values in", out.size(dim), index.edges.sides[0])
    total: Tensor = index.edges.at_sources(values.movedim(dim, 0))
    return out + total.movedim(0, dim)


@NodeNumbers.handles(Tensor.scatter_reduce_)
def _scatter_greatest(
    out: Tensor, dim: int, index: SourceIndex, values: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """The maximum that `softmax` subtracts."""
    right = isinstance(index, SourceIndex) and (dim % out.dim()) == (index.along or 0) == 0
    if not right or reduce != "amax" or include_self or values.requires_grad:
        raise refuse(f"scatter_reduce by {reduce}")
    check_rows("The sources take the maximum in", len(out), index.edges.sides[0])
    check_rows("The sources take the maximum of", len(values), index.edges.size(1), "edges")
    rows = by_head(index.edges.in_graph_order(values))
    # The last column marks sources that have edges.
    greatest = max_at_sources(index.edges.passes[0].call_context(), torch.cat([rows, rows.new_ones(len(rows), 1)], 1))
    return out.copy_(greatest[:, :-1].masked_fill(greatest[:, -1:] == -torch.inf, 0).view_as(out))
