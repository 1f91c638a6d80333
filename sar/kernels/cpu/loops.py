"""The loops over edges that Numba compiles: sums, running maxima and minima, per-edge results and gradients.

Each is one walk over edges that are grouped by the row of one end, called "own"; the row at the other end is "other".
A block is stored grouped by destination, its transpose by source. Operands are flat, row after row. Indices are
unsigned, because Numba compiles signed ones with a check for negative values that keeps loops from being vectorised.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sar.kernels.cpu.intrinsics import inline, kernel, line_length, prefetch
from sar.kernels.cpu.vectors import add_dot, add_product, add_scaled

OWN, OTHER, EDGE = 0, 1, 2  # whose rows an operand has
# Operations: sign * a, a + sign * b, a * b (dot is this with a summed last dimension), a / b, and as a derivative only
# -a * b / c**2. The sign is 1 or -1, which costs nothing and saves compiling subtraction and negation.
COPY, ADD, MUL, DIV, DIV_RHS = 0, 1, 2, 3, 4

Array = Any  # flat, of whatever type is compiled for
Index = Any  # uint64

u64 = np.uint64
ZERO, ONE = u64(0), u64(1)
AHEAD = u64(8)  # edges between asking for a row and using it
LEAD = u64(8)  # cache lines of a row that are asked for; the processor sees the pattern and fetches the rest by itself


class Walk(NamedTuple):
    """Edges grouped by the row of one end; group i has the edges indptr[i]:indptr[i + 1]."""

    rows: NDArray[Any]  # (groups,): row of each group; empty: i
    indptr: NDArray[Any]  # (groups + 1,)
    other: NDArray[Any]  # (E,): row of the other end of each edge
    positions: NDArray[Any]  # (E,): position of each edge in the block; empty: its index here
    edge_ids: NDArray[Any]  # (E,): edge ID at each position; empty: edge_offset + position
    edge_offset: Index


class Layout(NamedTuple):
    """The product space of three operands a, b and out as runs of `length` elements, so that inner loops are plain.

    In run h operand a has its elements at a_offsets[h] + i * a_step, i < length, where a_step is 0 or 1; so have b and
    out. Operands of trailing shapes (H, D) and (H, 1), for instance, meet in H runs of D.
    """

    length: Index
    a_offsets: NDArray[Any]  # (runs,) uint64
    b_offsets: NDArray[Any]
    out_offsets: NDArray[Any]
    a_step: Index
    b_step: Index
    out_step: Index
    a_width: Index  # elements in a row
    b_width: Index
    out_width: Index


@inline
def own_row(walk: Walk, group: Index) -> Index:
    """The row that the edges of a group have in common."""
    return u64(walk.rows[group]) if walk.rows.size else group


@inline
def edge_row(walk: Walk, p: Index) -> Index:
    """The row of an edge in edge operands."""
    position = u64(walk.positions[p]) if walk.positions.size else p
    return u64(walk.edge_ids[position]) if walk.edge_ids.size else walk.edge_offset + position


@inline
def _row(whose: int, walk: Walk, own: Index, p: Index) -> Index:
    if whose == OWN:
        return own
    return u64(walk.other[p]) if whose == OTHER else edge_row(walk, p)


@inline
def look_ahead(whose: int, walk: Walk, p: Index, operand: Array, width: Index, ahead: Index = AHEAD) -> None:
    """Prefetch the operand's row of an edge soon to come; this hides most of the latency of random rows."""
    p += ahead
    if whose != OWN and p < u64(walk.other.size):
        start = (u64(walk.other[p]) if whose == OTHER else edge_row(walk, p)) * width
        line = line_length(operand)
        for i in range(start, start + min(width, LEAD * line), line):
            prefetch(operand, i)


@inline
def _set(out: Array, io: Index, value: Any, arg: Array, edge_id: Any, largest: bool) -> None:
    out[io] = value


@inline
def _add(out: Array, io: Index, value: Any, arg: Array, edge_id: Any, largest: bool) -> None:
    out[io] += value


@inline
def _keep_best(out: Array, io: Index, value: Any, arg: Array, edge_id: Any, largest: bool) -> None:
    best, winner = out[io], arg[io]
    better = ((value > best) if largest else (value < best)) | ((value == best) & (edge_id > winner))
    out[io] = value if better else best
    arg[io] = edge_id if better else winner


def _run(operator: Any, store: Any) -> Any:
    """A function that stores operator(sign, a, b) for one run, summed over the run where out has step 0."""
    operator = inline(operator)

    @inline
    def run(
        lay: Layout,
        sign: Any,
        a: Array,
        ia: Index,
        b: Array,
        ib: Index,
        out: Array,
        io: Index,
        arg: Array,
        edge_id: Any,
        largest: bool,
    ) -> None:
        if lay.out_step == ZERO:  # then both others have step 1
            total = operator(sign, a[ia], b[ib])
            for i in range(ONE, lay.length):
                total += operator(sign, a[ia + i], b[ib + i])
            store(out, io, total, arg, edge_id, largest)
        elif lay.a_step == ZERO:
            for i in range(lay.length):
                store(out, io + i, operator(sign, a[ia], b[ib + i]), arg, edge_id, largest)
        elif lay.b_step == ZERO:
            for i in range(lay.length):
                store(out, io + i, operator(sign, a[ia + i], b[ib]), arg, edge_id, largest)
        else:
            for i in range(lay.length):
                store(out, io + i, operator(sign, a[ia + i], b[ib + i]), arg, edge_id, largest)

    return run


_Run = Any  # what `_run` makes


def _combine(copy: _Run, add: _Run, multiply: _Run, divide: _Run) -> Any:
    """A function that stores op(a, b) for all runs of an edge, whose rows of a, b and out start at a0, b0 and o0."""

    @inline
    def combine(
        op: int,
        sign: int,
        lay: Layout,
        a: Array,
        a0: Index,
        b: Array,
        b0: Index,
        out: Array,
        o0: Index,
        arg: Array,
        edge_id: Any,
        largest: bool,
    ) -> None:
        sign = a.dtype.type(sign)
        for h in range(u64(lay.a_offsets.size)):
            ia, ib, io = a0 + lay.a_offsets[h], b0 + lay.b_offsets[h], o0 + lay.out_offsets[h]
            if op == COPY:
                copy(lay, sign, a, ia, b, ib, out, io, arg, edge_id, largest)
            elif op == ADD:
                add(lay, sign, a, ia, b, ib, out, io, arg, edge_id, largest)
            elif op == MUL:
                multiply(lay, sign, a, ia, b, ib, out, io, arg, edge_id, largest)
            else:
                divide(lay, sign, a, ia, b, ib, out, io, arg, edge_id, largest)

    return combine


def _runs(store: Any) -> tuple[_Run, _Run, _Run, _Run]:
    """Copy, add, multiply and divide."""
    return (
        _run(lambda sign, x, y: sign * x, store),
        _run(lambda sign, x, y: x + sign * y, store),
        _run(lambda sign, x, y: x * y, store),
        _run(lambda sign, x, y: x / y, store),
    )


def _adding_runs() -> tuple[_Run, _Run, _Run, _Run]:
    """`_runs` that add, with vector code where it pays."""
    plain_copy, add, _, divide = _runs(_add)

    @inline
    def copy(
        lay: Layout,
        sign: Any,
        a: Array,
        ia: Index,
        b: Array,
        ib: Index,
        out: Array,
        io: Index,
        arg: Array,
        edge_id: Any,
        largest: bool,
    ) -> None:
        if lay.out_step == ZERO or lay.a_step == ZERO:
            plain_copy(lay, sign, a, ia, b, ib, out, io, arg, edge_id, largest)
        else:
            add_scaled(lay.length, out, io, a, ia, sign)

    @inline
    def multiply(
        lay: Layout,
        sign: Any,
        a: Array,
        ia: Index,
        b: Array,
        ib: Index,
        out: Array,
        io: Index,
        arg: Array,
        edge_id: Any,
        largest: bool,
    ) -> None:
        if lay.out_step == ZERO:
            add_dot(lay.length, out, io, a, ia, b, ib)
        elif lay.a_step == ZERO:
            add_scaled(lay.length, out, io, b, ib, a[ia])
        elif lay.b_step == ZERO:
            add_scaled(lay.length, out, io, a, ia, b[ib])
        else:
            add_product(lay.length, out, io, a, ia, b, ib)

    return copy, add, multiply, divide


_combine_set = _combine(*_runs(_set))
_combine_add = _combine(*_adding_runs())
_combine_best = _combine(*_runs(_keep_best))


@kernel
def assign(
    begin: int,
    end: int,
    walk: Walk,
    op: int,
    sign: int,
    lay: Layout,
    a: Array,
    a_rows: int,
    b: Array,
    b_rows: int,
    out: Array,
) -> None:
    """Write op(a, b) to out[edge] for the edges of groups begin to end."""
    for group in range(u64(begin), u64(end)):
        own = own_row(walk, group)
        for p in range(u64(walk.indptr[group]), u64(walk.indptr[group + ONE])):
            look_ahead(a_rows, walk, p, a, lay.a_width)
            if op != COPY:
                look_ahead(b_rows, walk, p, b, lay.b_width)
            a0 = _row(a_rows, walk, own, p) * lay.a_width
            b0 = _row(b_rows, walk, own, p) * lay.b_width
            o0 = edge_row(walk, p) * lay.out_width
            _combine_set(op, sign, lay, a, a0, b, b0, out, o0, out, ZERO, False)


@kernel
def accumulate(
    begin: int,
    end: int,
    walk: Walk,
    op: int,
    sign: int,
    lay: Layout,
    a: Array,
    a_rows: int,
    b: Array,
    b_rows: int,
    out: Array,
    out_rows: int,
) -> None:
    """Add op(a, b) of the edges of groups begin to end to rows of out, of either end or of the edges."""
    for group in range(u64(begin), u64(end)):
        own = own_row(walk, group)
        for p in range(u64(walk.indptr[group]), u64(walk.indptr[group + ONE])):
            look_ahead(a_rows, walk, p, a, lay.a_width)
            if op != COPY:
                look_ahead(b_rows, walk, p, b, lay.b_width)
            a0 = _row(a_rows, walk, own, p) * lay.a_width
            b0 = _row(b_rows, walk, own, p) * lay.b_width
            o0 = _row(out_rows, walk, own, p) * lay.out_width
            _combine_add(op, sign, lay, a, a0, b, b0, out, o0, out, ZERO, False)


@kernel
def compare(
    begin: int,
    end: int,
    walk: Walk,
    op: int,
    sign: int,
    lay: Layout,
    a: Array,
    a_rows: int,
    b: Array,
    b_rows: int,
    out: Array,
    arg: Array,
    largest: bool,
) -> None:
    """Keep in out[own] the greatest (least) op(a, b) of the edges of groups begin to end, in arg[own] its edge ID."""
    for group in range(u64(begin), u64(end)):
        own = own_row(walk, group)
        for p in range(u64(walk.indptr[group]), u64(walk.indptr[group + ONE])):
            look_ahead(a_rows, walk, p, a, lay.a_width)
            if op != COPY:
                look_ahead(b_rows, walk, p, b, lay.b_width)
            a0 = _row(a_rows, walk, own, p) * lay.a_width
            b0 = _row(b_rows, walk, own, p) * lay.b_width
            edge_id = arg.dtype.type(edge_row(walk, p))
            _combine_best(op, sign, lay, a, a0, b, b0, out, own * lay.out_width, arg, edge_id, largest)


def _run_where(operator: Any) -> Any:
    """A function that adds operator(sign, a, b, c) to out where `arg`, laid out as a, is the edge's ID."""
    operator = inline(operator)

    @inline
    def run(
        lay: Layout,
        sign: Any,
        a: Array,
        ia: Index,
        b: Array,
        ib: Index,
        c: Array,
        out: Array,
        io: Index,
        arg: Array,
        edge_id: Any,
    ) -> None:
        if arg.size == 0:
            for i in range(lay.length):
                here, there = ia + i * lay.a_step, io + i * lay.out_step
                out[there] += operator(sign, a[here], b[ib + i * lay.b_step], c[there])
        else:
            for i in range(lay.length):
                here, there = ia + i * lay.a_step, io + i * lay.out_step
                value = operator(sign, a[here], b[ib + i * lay.b_step], c[there])
                out[there] += value if arg[here] == edge_id else a.dtype.type(0)

    return run


_copy_where = _run_where(lambda sign, x, y, z: sign * x)
_multiply_where = _run_where(lambda sign, x, y, z: x * y)
_divide_where = _run_where(lambda sign, x, y, z: x / y)
_divide_rhs_where = _run_where(lambda sign, x, y, z: -x * y / (z * z))


@kernel
def accumulate_where(
    begin: int,
    end: int,
    walk: Walk,
    op: int,
    sign: int,
    lay: Layout,
    a: Array,
    a_rows: int,
    b: Array,
    b_rows: int,
    c: Array,
    arg: Array,
    out: Array,
    out_rows: int,
) -> None:
    """As `accumulate`, with a third operand, and only where arg is the edge's ID; everywhere where arg is empty.

    This is slower; it serves the gradients of maxima, minima and denominators. c has the rows and layout of out, arg
    those of a.
    """
    sign = a.dtype.type(sign)
    for group in range(u64(begin), u64(end)):
        own = own_row(walk, group)
        for p in range(u64(walk.indptr[group]), u64(walk.indptr[group + ONE])):
            look_ahead(a_rows, walk, p, a, lay.a_width)
            look_ahead(a_rows, walk, p, arg, lay.a_width)
            a0 = _row(a_rows, walk, own, p) * lay.a_width
            b0 = _row(b_rows, walk, own, p) * lay.b_width
            o0 = _row(out_rows, walk, own, p) * lay.out_width
            edge_id = arg.dtype.type(edge_row(walk, p))
            for h in range(u64(lay.a_offsets.size)):
                ia, ib, io = a0 + lay.a_offsets[h], b0 + lay.b_offsets[h], o0 + lay.out_offsets[h]
                if op == COPY:
                    _copy_where(lay, sign, a, ia, b, ib, c, out, io, arg, edge_id)
                elif op == MUL:
                    _multiply_where(lay, sign, a, ia, b, ib, c, out, io, arg, edge_id)
                elif op == DIV:
                    _divide_where(lay, sign, a, ia, b, ib, c, out, io, arg, edge_id)
                else:
                    _divide_rhs_where(lay, sign, a, ia, b, ib, c, out, io, arg, edge_id)


@kernel
def add_rows(rows: Any, values: Array, out: Array, width: Index) -> None:
    """Add row i of values to row rows[i] of out."""
    for i in range(u64(rows.size)):
        add_scaled(width, out, u64(rows[i]) * width, values, i * width, values.dtype.type(1))


@kernel
def transpose(rows: Any, indptr: Any, cols: Any, by_col: Any, dst: Any, positions: Any) -> None:
    """Group the edges by column in by_col, (columns + 1,) zeros at first, dst and positions, keeping their order."""
    for p in range(u64(cols.size)):
        by_col[u64(cols[p]) + ONE] += 1
    for column in range(ONE, u64(by_col.size)):
        by_col[column] += by_col[column - ONE]
    # by_col[c] is where the next edge of column c goes; when all are placed it has become where column c ends.
    for group in range(u64(rows.size)):
        for p in range(u64(indptr[group]), u64(indptr[group + ONE])):
            slot = u64(by_col[u64(cols[p])])
            by_col[u64(cols[p])] += 1
            dst[slot], positions[slot] = rows[group], p
    begin = by_col.dtype.type(0)
    for column in range(u64(by_col.size)):
        begin, by_col[column] = by_col[column], begin
