"""The view of a block for compiled kernels: flat arrays of edges, grouped by the row of one end.

That row is called "own", the row at the other end "other". A block is stored grouped by destination, its transpose by
source. Indices are unsigned, because Numba compiles signed ones with a check for negative values that keeps loops from
being vectorised.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sar.host import compiler
from sar.host.compiler import inline, kernel, prefetch
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


class CSRView(NamedTuple):
    """Edges grouped by the row of one end; group i has the edges indptr[i]:indptr[i + 1]."""

    rows: NDArray[Any]  # (groups,): row of each group; empty: i
    indptr: NDArray[Any]  # (groups + 1,)
    other: NDArray[Any]  # (E,): row of the other end of each edge
    positions: NDArray[Any]  # (E,): position of each edge in the block; empty: its index here
    edge_ids: NDArray[Any]  # (E,): edge ID at each position; empty: edge_offset + position
    edge_offset: Index


def view(block: EdgeBlock, *, by_source: bool = False, with_edges: bool = True) -> CSRView:
    """The edges of a block grouped by destination or source; `with_edges` says whether their IDs are needed."""
    key, keeps = (by_source, with_edges), tensor_file.value is None  # a file of tensors must hear of each use
    if keeps and key in block.derived:
        kept: CSRView = block.derived[key]
        return kept
    if by_source:
        indptr, other, positions, rows = block.transposed(transpose, with_positions=with_edges)
    else:
        rows, indptr, other, positions = block.rows, block.indptr, block.cols, None
    indices = rows, indptr, other, positions, block.edge_ids if with_edges else None
    arrays = (NO_INDICES if each is None else as_numpy(each) for each in indices)
    csr = CSRView._make([*arrays, np.uint64(block.edge_offset)])
    if keeps:
        block.derived[key] = csr
    return csr


@inline
def own_row(csr: CSRView, group: Index) -> Index:
    """The common row of a group's edges."""
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
    """Prefetch an operand's row for a later edge, which hides most of the latency of random rows."""
    p += rows_ahead(operand, width)
    if whose != OWN and p < u64(csr.other.size):
        start = (u64(csr.other[p]) if whose == OTHER else edge_row(csr, p)) * width
        prefetch_row(operand, start, width)


@inline
def rows_ahead(array: Array, width: Index) -> Index:
    """How many rows ahead to prefetch: the narrower they are, the sooner each is used."""
    return FARTHEST - NEARER * min(_lines(array, width), TEN)


@inline
def prefetch_row(array: Array, start: Index, width: Index) -> None:
    """Prefetch the first LEAD cache lines of array[start : start + width]."""
    for line in range(min(_lines(array, width), LEAD)):
        prefetch(array, start, line)


@inline
def _lines(array: Array, width: Index) -> Index:
    """Number of cache lines of a row."""
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


@kernel
def place_edges(
    src: Array, dst: Array, part_of: Array, row_of: Array, ends: Array, ends_of_rows: Array, by_part: Array,
    places: Array,
) -> None:  # fmt: skip
    """Sort edges by the partition of their source and then by destination, by counting; equal ones keep their order.

    Args:
        src, dst: (E,) nodes.
        part_of, row_of: (N,) the partition of each node, and its row among destinations.
        ends: (partitions + 1,) zeros; set to 0 and the end of each partition's edges.
        ends_of_rows, by_part: (rows + 1,) and (E,) for intermediate results.
        places: (E,) is set to the place of each edge.
    """
    for edge in range(u64(src.size)):
        ends[u64(part_of[u64(src[edge])]) + ONE] += 1
    for part in range(ONE, u64(ends.size)):
        ends[part] += ends[part - ONE]
    for edge in range(u64(src.size)):
        part = u64(part_of[u64(src[edge])])
        by_part[u64(ends[part])] = edge
        ends[part] += 1
    begin = ends.dtype.type(0)
    for part in range(u64(ends.size)):
        begin, ends[part] = ends[part], begin
    for part in range(u64(ends.size) - ONE):
        first, last = u64(ends[part]), u64(ends[part + ONE])
        for row in range(u64(ends_of_rows.size)):
            ends_of_rows[row] = 0
        ends_of_rows[ZERO] = first
        for i in range(first, last):
            ends_of_rows[u64(row_of[u64(dst[u64(by_part[i])])]) + ONE] += 1
        for row in range(ONE, u64(ends_of_rows.size)):
            ends_of_rows[row] += ends_of_rows[row - ONE]
        for i in range(first, last):
            edge = u64(by_part[i])
            row = u64(row_of[u64(dst[edge])])
            places[edge] = ends_of_rows[row]
            ends_of_rows[row] += 1


@kernel
def put(numbers: Array, table: Array, places: Array, result: Array) -> None:
    """result[places[i]] = table[numbers[i]] for each i; without a table, numbers[i]."""
    for i in range(u64(numbers.size)):
        result[u64(places[i])] = table[u64(numbers[i])] if table.size else numbers[i]
