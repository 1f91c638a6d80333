"""How the Triton kernels see a block: its edges grouped by the row of one end, in pieces of bounded length.

That row is called "own", the row at the other end "other", as in `sar.kernels.cpu.csr_view`. A block is stored grouped
by destination, its transpose by source, so that every result belongs to one program: no atomics, and the same bits in
every run.

[Note: hubs]
A program takes the edges of one row, one after the other, so a row with a million of them would keep all others
waiting. It stops after PIECE edges: the rest of a hub is cut into pieces that programs of a second launch take,
each with a row of its own to write to, and these rows are then aggregated like edges of a small block (`Hubs.block`).
Most blocks have no hubs, and one launch. Which rows are hubs is found once a block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from sar.kernels.edge_block import EdgeBlock, Transposed, index_dtype
from sar.tensor_views import materialize

PIECE = 1024
"""Edges of one row that one program takes; enough that the merging costs little."""
TILE = 1024
"""Elements of the tensors that a program works with: 8 for each of its threads, so that a few fit into registers."""

ACCUMULATED = {torch.float32: tl.float32, torch.float64: tl.float64}


class Edges(NamedTuple):
    """Edges grouped by the row of one end, as kernels take them: those of group i are begin[i] to end[i]."""

    own: Tensor | None  # (groups,) row of each group; None: group i has row i
    begin: Tensor  # (groups,)
    end: Tensor  # (groups,)
    other: Tensor  # (E,) row of the other end of each edge
    positions: Tensor | None  # (E,) position of each edge in the block; None: its index here
    ids: Tensor | None  # edge ID at each position; None: offset + position
    offset: int
    most: int  # edges of a group that a program takes
    into: Tensor | None = None  # (groups,) row of each group's result; None: its own

    @property
    def groups(self) -> int:
        """Number of groups."""
        return self.begin.numel()


class Hubs(NamedTuple):
    """The pieces of rows beyond their first."""

    edges: Edges
    block: EdgeBlock  # from pieces to their rows


class Grouping(NamedTuple):
    """The edges of a block grouped by one end."""

    edges: Edges
    hubs: Hubs | None


def by_destination(block: EdgeBlock, *, with_edges: bool = True) -> Grouping:
    """The edges grouped by destination; `with_edges` says whether their IDs are needed."""
    return _grouping(block, "destination", block.rows, block.indptr, block.cols, None, with_edges)


def by_source(block: EdgeBlock, *, with_edges: bool = True) -> Grouping:
    """The edges grouped by source; `with_edges` says whether their IDs are needed."""
    indptr, dst, positions, sources = block.transposed(transpose, with_positions=with_edges)
    return _grouping(block, "source", sources, indptr, dst, positions if with_edges else None, with_edges)


def _grouping(
    block: EdgeBlock, end: str, own: Tensor | None, indptr: Tensor, other: Tensor, positions: Tensor | None, ids: bool
) -> Grouping:
    if block.num_edges > 2**31 - 2 * PIECE:
        indptr = indptr.long()  # programs look at positions beyond a piece's end, too
    begin, stop = indptr[:-1], indptr[1:]
    edges = Edges(own, begin, stop, other, positions, None, 0, PIECE)
    if ids:
        edges = edges._replace(ids=block.edge_ids, offset=block.edge_offset)
    pieces = block.kept(f"pieces by {end}", lambda: _pieces(edges))
    if pieces is None:
        return Grouping(edges, None)
    own, begin, stop, merge = pieces  # [Note: hubs]
    return Grouping(edges, Hubs(edges._replace(own=own, begin=begin, end=stop, into=merge.cols), merge))


def transpose(block: EdgeBlock) -> Transposed:
    """The block's edges grouped by source, in the order of the block within a source."""
    sources, order = block.cols.sort(stable=True)
    bounds = torch.arange(block.num_src + 1, dtype=sources.dtype, device=block.device)
    dtype = index_dtype(block.num_edges)
    return Transposed(torch.searchsorted(sources, bounds).to(dtype), block.dst[order], order.to(dtype))


def _pieces(edges: Edges) -> tuple[Tensor, Tensor, Tensor, EdgeBlock] | None:
    """Of pieces beyond the first of their rows: the rows, first edges and ends, and a block from them to the rows."""
    more = (edges.end - edges.begin - 1).div(edges.most, rounding_mode="floor").clamp_(min=0)
    count = int(more.sum())
    if count == 0:
        return None
    group = more.nonzero().squeeze(1)
    more = more[group].long()
    of = torch.arange(len(group), device=group.device).repeat_interleave(more, output_size=count)
    first = more.cumsum(0) - more
    number = torch.arange(1, count + 1, device=group.device) - first[of]
    rows = (group if edges.own is None else edges.own[group]).to(torch.int32)
    begin = edges.begin[group][of] + (number * edges.most).to(edges.begin.dtype)
    indptr = torch.cat([first, first.new_full((1,), count)]).to(torch.int32)
    cols = torch.arange(count, dtype=torch.int32, device=group.device)
    return rows[of], begin, edges.end[group][of], EdgeBlock(rows, indptr, cols, count, 0)


def ready(tensor: Tensor) -> Tensor:
    """The tensor as kernels read it: rows one after the other."""
    return materialize(tensor.detach()).contiguous()


def sum_type(out: Tensor) -> Any:
    """The dtype of sums into a result: float32, or float64 if the result has that."""
    return ACCUMULATED[torch.promote_types(out.dtype, torch.float32)]


def at_once(width: int, most: int) -> int:
    """How many rows of `width` elements a program takes at a time, a power of two as these are."""
    return max(1, min(most, TILE // width))


def warps(elements: int) -> int:
    """Warps of a program that holds so many elements at a time."""
    return max(1, min(8, elements // 256))


def launch(run: Any, grid: tuple[int, ...], on: Tensor, *operands: Any, num_warps: int, **constants: Any) -> None:
    """Run a kernel on the device of a tensor, which need not be the current one."""
    with torch.cuda.device_of(on):
        run[grid](*operands, num_warps=num_warps, enable_fp_fusion=True, **constants)
