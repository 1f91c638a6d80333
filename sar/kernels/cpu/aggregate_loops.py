"""The compiled loops over edges: sums, running maxima and minima, results of edges, and gradients.

Each goes through the edges of a `CSRView`, and at each edge does an operation on one row of each of three operands a, b
and out, run by run of the product space (`Layout`).
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sar.host.compiler import inline, inline_distinct, kernel, narrow, wide
from sar.kernels.cpu.csr_view import ONE, ZERO, Array, CSRView, Index, edge_row, look_ahead, own_row, row_of
from sar.kernels.cpu.rows import add_scaled, clear, row_sums
from sar.kernels.ops import Shape

# Operations: sign * a, a + sign * b, a * b (dot is this with a summed last dimension), a / b, and as a derivative only
# -a * b / c**2. The sign is 1 or -1, which costs nothing and saves compiling subtraction and negation.
COPY, ADD, MUL, DIV, DIV_RHS = 0, 1, 2, 3, 4

u64 = np.uint64


class Layout(NamedTuple):
    """The product space of three operands a, b and out, as runs of `length` elements for simple inner loops.

    In run h operand a has its elements at a_offsets[h] + i * a_step, i < length, where a_step is 0 or 1; so have b and
    out. Operands of trailing shapes (H, D) and (H, 1), for instance, meet in H runs of D.
    """

    length: Index
    size: int  # elements of the product space
    a_offsets: NDArray[Any]  # (runs,) uint64
    b_offsets: NDArray[Any]
    out_offsets: NDArray[Any]
    a_step: Index
    b_step: Index
    out_step: Index
    a_width: Index  # elements in a row
    b_width: Index
    out_width: Index


@lru_cache(maxsize=1024)
def make_layout(full: Shape, a: Shape, b: Shape, out: Shape) -> Layout:
    """The layout of operands with shapes a, b and out of equal length that broadcast to `full`; no size is 0."""
    operands = (a, b, out)
    start, steps = len(full), None
    while start > 0:  # the longest tail of dimensions that each operand has as a whole or not at all
        if full[start - 1] != 1:
            present = tuple(shape[start - 1] != 1 for shape in operands)
            if steps not in (None, present):
                break
            steps = present
        start -= 1
    length = prod(full[start:])
    offsets = (np.broadcast_to(np.arange(prod(s), dtype=np.uint64).reshape(s), full) for s in operands)
    return Layout(
        np.uint64(length),
        prod(full),
        *(offset.reshape(-1, length)[:, 0].copy() for offset in offsets),
        *(np.uint64(step) for step in steps or (True, True, True)),
        *(np.uint64(prod(shape)) for shape in operands),
    )


class Formula(NamedTuple):
    """The operation at each edge."""

    op: int
    sign: int
    layout: Layout


class Table(NamedTuple):
    """An operand: its flat rows, and whose rows they are: OWN, OTHER or EDGE."""

    values: Array
    whose: int


class Row(NamedTuple):
    """A place in an operand."""

    values: Array
    at: Index


@inline
def _rows(csr: CSRView, formula: Formula, own: Index, p: Index, a: Table, b: Table, out: Table) -> Any:
    """The rows of edge p in a, b and out. Also prefetches rows of later edges."""
    layout = formula.layout
    look_ahead(a.whose, csr, p, a.values, layout.a_width)
    if formula.op != COPY:
        look_ahead(b.whose, csr, p, b.values, layout.b_width)
    row_a = Row(a.values, row_of(a.whose, csr, own, p) * layout.a_width)
    row_b = Row(b.values, row_of(b.whose, csr, own, p) * layout.b_width)
    return row_a, row_b, Row(out.values, row_of(out.whose, csr, own, p) * layout.out_width)


@inline
def _run(layout: Layout, h: Index, rows: Any) -> Any:
    """The offset of run h in rows of a, b and out."""
    a, b, out = rows
    at_a, at_b = Row(a.values, a.at + layout.a_offsets[h]), Row(b.values, b.at + layout.b_offsets[h])
    return at_a, at_b, Row(out.values, out.at + layout.out_offsets[h])


# -- what is done with one element


@inline
def _set(out: Array, i: Index, value: Any) -> None:
    out[i] = narrow(value, out)


@inline
def _add(out: Array, i: Index, value: Any) -> None:
    out[i] = narrow(wide(out[i]) + value, out)


@inline
def _keep_best(out: Array, i: Index, value: Any, arg: Array, edge_id: Any, largest: bool) -> None:
    best, best_id = out[i], arg[i]
    better = ((value > best) if largest else (value < best)) | ((value == best) & (edge_id > best_id))
    out[i] = value if better else best
    arg[i] = edge_id if better else best_id


# -- what is done with one run: one function for each operation and each way to store its results


def _loop(operator: Any, store: Any, compile_helper: Any) -> Any:
    """A loop that stores operator(sign, a, b), summed over the run if out has step 0.

    It passes the arguments after `out` to `store`.
    """
    operator = inline(operator)

    def loop(layout: Layout, sign: Any, a: Row, b: Row, out: Row, *rest: Any) -> None:
        if layout.out_step == ZERO:  # then both others have step 1
            total = operator(sign, a.values[a.at], b.values[b.at])
            for i in range(ONE, layout.length):
                total += operator(sign, a.values[a.at + i], b.values[b.at + i])
            store(out.values, out.at, total, *rest)
        elif layout.a_step == ZERO:
            for i in range(layout.length):
                store(out.values, out.at + i, operator(sign, a.values[a.at], b.values[b.at + i]), *rest)
        elif layout.b_step == ZERO:
            for i in range(layout.length):
                store(out.values, out.at + i, operator(sign, a.values[a.at + i], b.values[b.at]), *rest)
        else:
            for i in range(layout.length):
                store(out.values, out.at + i, operator(sign, a.values[a.at + i], b.values[b.at + i]), *rest)

    return compile_helper(loop)


def _loops(store: Any, compile_helper: Any) -> list[Any]:
    """The loops of COPY, ADD, MUL and DIV."""
    return [
        _loop(lambda sign, x, y: sign * wide(x), store, compile_helper),
        _loop(lambda sign, x, y: wide(x) + sign * wide(y), store, compile_helper),
        _loop(lambda sign, x, y: wide(x) * wide(y), store, compile_helper),
        _loop(lambda sign, x, y: wide(x) / wide(y), store, compile_helper),
    ]


def _loop_where(operator: Any) -> Any:
    """A loop that adds operator(sign, a, b, c) to out where `arg`, laid out as a, is the edge's ID.

    c is laid out as out. Where arg is empty it adds everywhere.
    """
    operator = inline(operator)

    @inline
    def loop(layout: Layout, sign: Any, a: Row, b: Row, out: Row, c: Array, arg: Array, edge_id: Any) -> None:
        if arg.size == 0:
            for i in range(layout.length):
                here, there = a.at + i * layout.a_step, out.at + i * layout.out_step
                _add(out.values, there, operator(sign, a.values[here], b.values[b.at + i * layout.b_step], c[there]))
        else:
            for i in range(layout.length):
                here, there = a.at + i * layout.a_step, out.at + i * layout.out_step
                value = operator(sign, a.values[here], b.values[b.at + i * layout.b_step], c[there])
                _add(out.values, there, value if arg[here] == edge_id else np.float32(0))

    return loop


_set_copy, _set_sum, _set_product, _set_quotient = _loops(_set, inline)
_add_copy, _add_sum, _add_product, _add_quotient = _loops(_add, inline_distinct)
_best_copy, _best_sum, _best_product, _best_quotient = _loops(_keep_best, inline)
_copy_where = _loop_where(lambda sign, x, y, z: sign * wide(x))
_product_where = _loop_where(lambda sign, x, y, z: wide(x) * wide(y))
_quotient_where = _loop_where(lambda sign, x, y, z: wide(x) / wide(y))
_derivative_where = _loop_where(lambda sign, x, y, z: -wide(x) * wide(y) / (wide(z) * wide(z)))


# -- the kernels, which go through the edges of groups begin to end


@kernel
def accumulate(begin: int, end: int, csr: CSRView, formula: Formula, a: Table, b: Table, out: Table) -> None:
    """Add op(a, b) to rows of out, for COPY and MUL."""
    layout, sign = formula.layout, np.float32(formula.sign)
    for group in range(u64(begin), u64(end)):
        own = own_row(csr, group)
        for p in range(u64(csr.indptr[group]), u64(csr.indptr[group + ONE])):
            rows = _rows(csr, formula, own, p, a, b, out)
            for h in range(u64(layout.a_offsets.size)):
                if formula.op == COPY:
                    _add_copy(layout, sign, *_run(layout, h, rows))
                else:
                    _add_product(layout, sign, *_run(layout, h, rows))


@kernel
def accumulate_others(begin: int, end: int, csr: CSRView, formula: Formula, a: Table, b: Table, out: Table) -> None:
    """As `accumulate`, for ADD and DIV. They are rare, so that most programs need not compile them."""
    layout, sign = formula.layout, np.float32(formula.sign)
    for group in range(u64(begin), u64(end)):
        own = own_row(csr, group)
        for p in range(u64(csr.indptr[group]), u64(csr.indptr[group + ONE])):
            rows = _rows(csr, formula, own, p, a, b, out)
            for h in range(u64(layout.a_offsets.size)):
                if formula.op == ADD:
                    _add_sum(layout, sign, *_run(layout, h, rows))
                else:
                    _add_quotient(layout, sign, *_run(layout, h, rows))


@kernel
def assign(begin: int, end: int, csr: CSRView, formula: Formula, a: Table, b: Table, out: Table) -> None:
    """Write op(a, b) to rows of out."""
    layout, sign = formula.layout, np.float32(formula.sign)
    for group in range(u64(begin), u64(end)):
        own = own_row(csr, group)
        for p in range(u64(csr.indptr[group]), u64(csr.indptr[group + ONE])):
            rows = _rows(csr, formula, own, p, a, b, out)
            for h in range(u64(layout.a_offsets.size)):
                if formula.op == COPY:
                    _set_copy(layout, sign, *_run(layout, h, rows))
                elif formula.op == ADD:
                    _set_sum(layout, sign, *_run(layout, h, rows))
                elif formula.op == MUL:
                    _set_product(layout, sign, *_run(layout, h, rows))
                else:
                    _set_quotient(layout, sign, *_run(layout, h, rows))


@kernel
def compare(
    begin: int, end: int, csr: CSRView, formula: Formula, a: Table, b: Table, out: Table, arg: Array, largest: bool
) -> None:
    """Keep the greatest (least) op(a, b) in rows of out, and its edge ID in arg."""
    layout, sign = formula.layout, np.float32(formula.sign)
    for group in range(u64(begin), u64(end)):
        own = own_row(csr, group)
        for p in range(u64(csr.indptr[group]), u64(csr.indptr[group + ONE])):
            rows, edge_id = _rows(csr, formula, own, p, a, b, out), arg.dtype.type(edge_row(csr, p))
            for h in range(u64(layout.a_offsets.size)):
                if formula.op == COPY:
                    _best_copy(layout, sign, *_run(layout, h, rows), arg, edge_id, largest)
                elif formula.op == ADD:
                    _best_sum(layout, sign, *_run(layout, h, rows), arg, edge_id, largest)
                elif formula.op == MUL:
                    _best_product(layout, sign, *_run(layout, h, rows), arg, edge_id, largest)
                else:
                    _best_quotient(layout, sign, *_run(layout, h, rows), arg, edge_id, largest)


@kernel
def accumulate_where(
    begin: int, end: int, csr: CSRView, formula: Formula, a: Table, b: Table, out: Table, c: Array, arg: Table
) -> None:
    """As `accumulate`, with a third operand, and only for elements whose arg is the edge's ID; for all if it is empty.

    This is slower; it serves the gradients of maxima, minima and denominators. c has the rows and layout of out, arg
    those of a.
    """
    layout, sign = formula.layout, np.float32(formula.sign)
    for group in range(u64(begin), u64(end)):
        own = own_row(csr, group)
        for p in range(u64(csr.indptr[group]), u64(csr.indptr[group + ONE])):
            look_ahead(arg.whose, csr, p, arg.values, layout.a_width)
            rows, edge_id = _rows(csr, formula, own, p, a, b, out), arg.values.dtype.type(edge_row(csr, p))
            for h in range(u64(layout.a_offsets.size)):
                if formula.op == COPY:
                    _copy_where(layout, sign, *_run(layout, h, rows), c, arg.values, edge_id)
                elif formula.op == MUL:
                    _product_where(layout, sign, *_run(layout, h, rows), c, arg.values, edge_id)
                elif formula.op == DIV:
                    _quotient_where(layout, sign, *_run(layout, h, rows), c, arg.values, edge_id)
                else:
                    _derivative_where(layout, sign, *_run(layout, h, rows), c, arg.values, edge_id)


_add_rows = row_sums(lambda p: None)


@row_sums
def _add_scaled_rows(p: Index, csr: CSRView, own: Index, b: Table, width: Index, offset: Index) -> Any:
    return wide(b.values[row_of(b.whose, csr, own, p) * width + offset])


@kernel
def accumulate_rows(
    begin: int, end: int, csr: CSRView, formula: Formula, a: Table, b: Table, out: Table, fresh: bool
) -> None:
    """As `accumulate`, if each run of an OTHER row of a is multiplied with one number and added to an OWN row.

    If `fresh`, out has no values yet, and rows without edges become 0.
    """
    layout, groups = formula.layout, u64(csr.indptr.size) - ONE
    cleared = own_row(csr, u64(begin) - ONE) + ONE if begin else ZERO  # rows before this one are not ours
    for group in range(u64(begin), u64(end)):
        own, first, last = own_row(csr, group), u64(csr.indptr[group]), u64(csr.indptr[group + ONE])
        if fresh:
            clear(out.values, cleared * layout.out_width, own * layout.out_width)
            cleared = own + ONE
        for h in range(u64(layout.a_offsets.size)):
            i, o = layout.a_offsets[h], own * layout.out_width + layout.out_offsets[h]
            where = csr, first, last, a.values, i, layout.a_width, layout.length, out.values, o, fresh
            if formula.op == COPY:
                _add_rows(*where)
            else:
                _add_scaled_rows(*where, csr, own, b, layout.b_width, layout.b_offsets[h])
    if fresh and u64(end) == groups:
        clear(out.values, cleared * layout.out_width, u64(out.values.size))


@kernel
def add_rows(rows: Any, values: Array, out: Array, width: Index) -> None:
    """Add row i of values to row rows[i] of out."""
    for i in range(u64(rows.size)):
        add_scaled(width, out, u64(rows[i]) * width, values, i * width, np.float32(1))
