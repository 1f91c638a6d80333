"""How the compiled kernels see a block: flat arrays of edges that are grouped by the row of one end.

That row is called "own", the row at the other end "other". A block is stored grouped by destination, its transpose by
source. Indices are unsigned, because Numba compiles signed ones with a check for negative values that keeps loops from
being vectorised.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sar.kernels import compiler
from sar.kernels.compiler import inline, kernel, prefetch
from sar.kernels.edge_block import EdgeBlock, Transposed, index_dtype
from sar.tensors.spillable import tensor_file
from sar.tensors.views import as_numpy

OWN, OTHER, EDGE = 0, 1, 2  # whose rows an operand has

Array = Any  # flat, of whatever type is compiled for
Index = Any  # uint64

u64 = np.uint64
ZERO, ONE, CACHE_LINE = u64(0), u64(1), u64(compiler.CACHE_LINE)
FARTHEST = u64(66)  # rows between asking for one and using it are as many, less NEARER for each of its first TEN lines
NEARER, TEN = u64(5), u64(10)
LEAD = u64(16)  # cache lines of a row that are asked for; the processor sees the pattern and fetches the rest by itself

NO_INDICES = np.empty(0, np.int32)
DIGIT_BITS = 22  # of numbers to sort: their counts take 16 MB, and the frequent ones stay in caches


class CSRView(NamedTuple):
    """Edges grouped by the row of one end; group i has the edges indptr[i]:indptr[i + 1]."""

    rows: NDArray[Any]  # (groups,): row of each group; empty: i
    indptr: NDArray[Any]  # (groups + 1,)
    other: NDArray[Any]  # (E,): row of the other end of each edge
    positions: NDArray[Any]  # (E,): position of each edge in the block; empty: its index here
    edge_ids: NDArray[Any]  # (E,): edge ID at each position; empty: edge_offset + position
    edge_offset: Index


def by_destination(block: EdgeBlock, *, with_edges: bool = True) -> CSRView:
    """The edges grouped by destination; `with_edges` says whether their IDs are needed."""

    def view() -> CSRView:
        return _view(block, block.rows, block.indptr, block.cols, None, with_edges)

    # A file of tensors must hear of each use.
    return block.kept(f"by destination, {with_edges}", view) if tensor_file.value is None else view()


def by_source(block: EdgeBlock, *, with_edges: bool = True) -> CSRView:
    """The edges grouped by source; `with_edges` says whether their IDs are needed."""

    def view() -> CSRView:
        indptr, dst, positions, sources = block.transposed(transpose, with_positions=with_edges)
        return _view(block, sources, indptr, dst, positions, with_edges)

    return block.kept(f"by source, {with_edges}", view) if tensor_file.value is None else view()


def _view(
    block: EdgeBlock, rows: Tensor | None, indptr: Tensor, other: Tensor, positions: Tensor | None, with_edges: bool
) -> CSRView:
    indices = rows, indptr, other, positions, block.edge_ids if with_edges else None
    arrays = (NO_INDICES if each is None else as_numpy(each) for each in indices)
    return CSRView._make([*arrays, np.uint64(block.edge_offset)])


@inline
def own_row(csr: CSRView, group: Index) -> Index:
    """The row that the edges of a group have in common."""
    return u64(csr.rows[group]) if csr.rows.size else group


@inline
def edge_row(csr: CSRView, p: Index) -> Index:
    """The row of an edge in edge operands."""
    position = u64(csr.positions[p]) if csr.positions.size else p
    return u64(csr.edge_ids[position]) if csr.edge_ids.size else csr.edge_offset + position


@inline
def row_of(whose: int, csr: CSRView, own: Index, p: Index) -> Index:
    """The row of edge p in operands with rows of OWN, OTHER or EDGE."""
    if whose == OWN:
        return own
    return u64(csr.other[p]) if whose == OTHER else edge_row(csr, p)


@inline
def look_ahead(whose: int, csr: CSRView, p: Index, operand: Array, width: Index) -> None:
    """Prefetch the operand's row of an edge soon to come; this hides most of the latency of random rows."""
    p += rows_ahead(operand, width)
    if whose != OWN and p < u64(csr.other.size):
        start = (u64(csr.other[p]) if whose == OTHER else edge_row(csr, p)) * width
        prefetch_row(operand, start, width)


@inline
def rows_ahead(array: Array, width: Index) -> Index:
    """How many rows of this width ahead of its use one is asked for: the narrower they are, the sooner each is used."""
    return FARTHEST - NEARER * min(_lines(array, width), TEN)


@inline
def prefetch_row(array: Array, start: Index, width: Index) -> None:
    """Ask for the first LEAD cache lines of array[start : start + width]."""
    for line in range(min(_lines(array, width), LEAD)):
        prefetch(array, start, line)


@inline
def _lines(array: Array, width: Index) -> Index:
    """Cache lines of a row."""
    return (width * u64(array.itemsize) + CACHE_LINE - ONE) // CACHE_LINE


def transpose(block: EdgeBlock) -> Transposed:
    """The block's edges grouped by source."""
    dtype = index_dtype(block.num_edges)
    result = Transposed(
        torch.zeros(block.num_src + 1, dtype=dtype, device="cpu"),
        torch.empty(block.num_edges, dtype=torch.int32, device="cpu"),
        torch.empty(block.num_edges, dtype=dtype, device="cpu"),
    )
    _sort_by_column(*(as_numpy(tensor) for tensor in (block.rows, block.indptr, block.cols, *result[:3])))
    return result


@kernel
def _sort_by_column(rows: Any, indptr: Any, cols: Any, by_col: Any, dst: Any, positions: Any) -> None:
    """Counting sort of the edges into by_col, (columns + 1,) zeros at first, dst and positions, keeping their order."""
    for p in range(u64(cols.size)):
        by_col[u64(cols[p]) + ONE] += 1
    for column in range(ONE, u64(by_col.size)):
        by_col[column] += by_col[column - ONE]
    # by_col[c] is the place of the next edge of column c; when all are placed it has become the end of column c.
    for group in range(u64(rows.size)):
        for p in range(u64(indptr[group]), u64(indptr[group + ONE])):
            slot = u64(by_col[u64(cols[p])])
            by_col[u64(cols[p])] += 1
            dst[slot], positions[slot] = rows[group], p
    begin = by_col.dtype.type(0)
    for column in range(u64(by_col.size)):
        begin, by_col[column] = by_col[column], begin


def sorted_places(numbers: Tensor, bound: int) -> Tensor:
    """The place of each number in sorted order, (n,) int32 or int64; equal numbers stay in their order.

    They are from 0 to below `bound`, (n,) integers on the CPU, and counted digit by digit, the last one first.
    """
    places = torch.arange(len(numbers), dtype=index_dtype(len(numbers)), device="cpu")
    for shift in range(0, (bound - 1).bit_length(), DIGIT_BITS):
        ordered = numbers if shift == 0 else torch.empty_like(numbers).scatter_(0, places.long(), numbers)
        table = np.zeros(min((bound - 1 >> shift) + 1, 2**DIGIT_BITS) + 1, np.int64)
        step = torch.empty_like(places)
        _places_by_digit(ordered.numpy(), u64(shift), u64(2**DIGIT_BITS - 1), table, step.numpy())
        places = step if shift == 0 else step.index_select(0, places)
    return places


@kernel
def _places_by_digit(numbers: Any, shift: Index, mask: Index, ends: Any, places: Any) -> None:
    """Counting sort by the bits of `mask`, after a shift. `ends` has zeros, one more than there are digits."""
    for i in range(u64(numbers.size)):
        ends[((u64(numbers[i]) >> shift) & mask) + ONE] += 1
    for digit in range(ONE, u64(ends.size)):
        ends[digit] += ends[digit - ONE]
    for i in range(u64(numbers.size)):
        digit = (u64(numbers[i]) >> shift) & mask
        places[i] = ends[digit]
        ends[digit] += 1
