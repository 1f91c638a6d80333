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

from sar.kernels.compiler import inline, inline_distinct, kernel, narrow, wide
from sar.kernels.cpu.csr_view import ONE, ZERO, Array, CSRView, Index, edge_row, look_ahead, own_row, row_of
from sar.kernels.cpu.rows import clear, row_sums
from sar.kernels.ops import Shape

# Operations: sign * a, a + sign * b, a * b (dot is this with a summed last dimension), a / b, and as a derivative only
# -a * b / c**2. The sign is 1 or -1, which costs nothing and saves compiling subtraction and negation.
COPY, ADD, MUL, DIV, DIV_RHS = 0, 1, 2, 3, 4

u64 = np.uint64


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
    """An operand: its rows one after the other, and the end of an edge that they belong to: OWN, OTHER or EDGE."""

    values: Array
    whose: int


class Row(NamedTuple):
    """A place in an operand."""

    values: Array
    at: Index


Function = Any  # compiled


@inline
def _row(table: Table, width: Index, csr: CSRView, own: Index, p: Index) -> Any:
    """The row of edge p in a table."""
    return Row(table.values, row_of(table.whose, csr, own, p) * width)


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


def _run(operator: Any, store: Function, helper: Any) -> Function:
    """A function that stores operator(sign, a, b) for one run, summed over the run if out has step 0.

    It passes the arguments after `out` to `store`. `helper` compiles it.
    """
    operator = inline(operator)

    def run(layout: Layout, sign: Any, a: Row, b: Row, out: Row, *rest: Any) -> None:
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

    return helper(run)


def _runs(store: Function, helper: Any = inline) -> dict[int, Function]:
    """Functions of one run by operation."""
    return {
        COPY: _run(lambda sign, x, y: sign * wide(x), store, helper),
        ADD: _run(lambda sign, x, y: wide(x) + sign * wide(y), store, helper),
        MUL: _run(lambda sign, x, y: wide(x) * wide(y), store, helper),
        DIV: _run(lambda sign, x, y: wide(x) / wide(y), store, helper),
    }


def _run_where(operator: Any) -> Function:
    """A function that adds operator(sign, a, b, c) to out where `arg`, laid out as a, is the edge's ID.

    c is laid out as out. Where arg is empty it adds everywhere.
    """
    operator = inline(operator)

    @inline
    def run(layout: Layout, sign: Any, a: Row, b: Row, out: Row, c: Array, arg: Array, edge_id: Any) -> None:
        if arg.size == 0:
            for i in range(layout.length):
                here, there = a.at + i * layout.a_step, out.at + i * layout.out_step
                _add(out.values, there, operator(sign, a.values[here], b.values[b.at + i * layout.b_step], c[there]))
        else:
            for i in range(layout.length):
                here, there = a.at + i * layout.a_step, out.at + i * layout.out_step
                value = operator(sign, a.values[here], b.values[b.at + i * layout.b_step], c[there])
                _add(out.values, there, value if arg[here] == edge_id else np.float32(0))

    return run


def _combine(runs: dict[int, Function]) -> Function:
    """A function that does all runs of an edge, from its rows of a, b and out; `runs` has one for each operation."""
    run = _choose(list(runs.items()))

    @inline
    def combine(csr: CSRView, p: Index, formula: Formula, a: Row, b: Row, out: Row, *rest: Any) -> None:
        layout, sign = formula.layout, np.float32(formula.sign)
        for h in range(u64(layout.a_offsets.size)):
            at_a = Row(a.values, a.at + layout.a_offsets[h])
            at_b = Row(b.values, b.at + layout.b_offsets[h])
            at_out = Row(out.values, out.at + layout.out_offsets[h])
            run(formula.op, layout, sign, at_a, at_b, at_out, *rest)

    return combine


def _choose(runs: list[tuple[int, Function]]) -> Function:
    """A function run(op, *operands) that calls that of these functions which has this operation."""
    (first, run_first), *others = runs
    if not others:
        return inline(lambda op, *operands: run_first(*operands))
    run_other = _choose(others)

    @inline
    def run(op: int, *operands: Any) -> None:
        if op == first:
            run_first(*operands)
        else:
            run_other(op, *operands)

    return run


def _over_edges(name: str, visit: Function) -> Function:
    """A kernel that calls visit(csr, p, formula, a, b, out, *rest) for each edge p of groups begin to end.

    The arguments a, b and out of `visit` are the rows of the edge.
    """

    def run(begin: int, end: int, csr: CSRView, formula: Formula, a: Table, b: Table, out: Table, *rest: Any) -> None:
        layout = formula.layout
        for group in range(u64(begin), u64(end)):
            own = own_row(csr, group)
            for p in range(u64(csr.indptr[group]), u64(csr.indptr[group + ONE])):
                look_ahead(a.whose, csr, p, a.values, layout.a_width)
                if formula.op != COPY:
                    look_ahead(b.whose, csr, p, b.values, layout.b_width)
                row_a = _row(a, layout.a_width, csr, own, p)
                row_b = _row(b, layout.b_width, csr, own, p)
                row_out = _row(out, layout.out_width, csr, own, p)
                visit(csr, p, formula, row_a, row_b, row_out, *rest)

    run.__name__ = name
    return kernel(run)


_adding = _runs(_add, inline_distinct)
_combine_best = _combine(_runs(_keep_best))
_combine_where = _combine(
    {
        COPY: _run_where(lambda sign, x, y, z: sign * wide(x)),
        MUL: _run_where(lambda sign, x, y, z: wide(x) * wide(y)),
        DIV: _run_where(lambda sign, x, y, z: wide(x) / wide(y)),
        DIV_RHS: _run_where(lambda sign, x, y, z: -wide(x) * wide(y) / (wide(z) * wide(z))),
    }
)


assign = _over_edges("assign", _combine(_runs(_set)))
"""Writes op(a, b) to rows of out."""

accumulate = _over_edges("accumulate", _combine({op: _adding[op] for op in (COPY, MUL)}))
"""Adds op(a, b) to rows of out, for COPY and MUL."""

accumulate_others = _over_edges("accumulate_others", _combine({op: _adding[op] for op in (ADD, DIV)}))
"""As `accumulate`, for ADD and DIV."""


_add_rows = row_sums(lambda p: None)


@row_sums
def _add_scaled_rows(p: Index, csr: CSRView, own: Index, b: Table, width: Index, offset: Index) -> Any:
    return wide(b.values[row_of(b.whose, csr, own, p) * width + offset])


@kernel
def accumulate_rows(
    begin: int, end: int, csr: CSRView, formula: Formula, a: Table, b: Table, out: Table, fresh: bool
) -> None:
    """As `accumulate`, if each run of an OTHER row of a is multiplied with one number and added to an OWN row.

    If `fresh`, out has no values yet, and rows without edges become 0, too.
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


@inline
def _compare(csr: CSRView, p: Index, formula: Formula, a: Row, b: Row, out: Row, arg: Array, largest: bool) -> None:
    _combine_best(csr, p, formula, a, b, out, arg, arg.dtype.type(edge_row(csr, p)), largest)


compare = _over_edges("compare", _compare)
"""Keeps in rows of out the greatest (least) op(a, b), in arg its edge ID."""


@inline
def _add_where(csr: CSRView, p: Index, formula: Formula, a: Row, b: Row, out: Row, c: Array, arg: Table) -> None:
    look_ahead(arg.whose, csr, p, arg.values, formula.layout.a_width)
    _combine_where(csr, p, formula, a, b, out, c, arg.values, arg.values.dtype.type(edge_row(csr, p)))


accumulate_where = _over_edges("accumulate_where", _add_where)
"""As `accumulate`, with a third operand, and only for elements whose arg is the edge's ID; for all if arg is empty.

This is slower; it serves the gradients of maxima, minima and denominators. c has the rows and layout of out, arg those
of a.
"""


@kernel
def add_rows(rows: Any, values: Array, out: Array, width: Index) -> None:
    """Add row i of values to row rows[i] of out."""
    for i in range(u64(rows.size)):
        _add_row(width, out, u64(rows[i]) * width, values, i * width)


@inline_distinct
def _add_row(width: Index, out: Array, to: Index, values: Array, at: Index) -> None:
    for k in range(width):
        _add(out, to + k, wide(values[at + k]))
