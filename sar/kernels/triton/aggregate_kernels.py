"""The kernels of aggregation in Triton: sums, running maxima and minima, and results of edges.

A program takes one row of a block, and adds up or compares the messages of the row's edges, some at a time. Operands,
`sizes` and constants: see `Operand`, `Formula` and `_run` in `sar.kernels.triton.aggregate`.
"""

from __future__ import annotations

import triton.language as tl

from sar.kernels.triton.edge_kernels import bounds, edge_rows, kernel, other_rows, own_row, result_row


@kernel
def _at(operand, rows, o, in_outer, again, i):
    """The offsets of rows' elements in an operand: (edges, OUTER, INNER), or (edges, OUTER, 1) if these repeat."""
    if operand.again_table is None:
        at = rows * operand.width + again * operand.again_step
    else:
        at = rows * operand.width + tl.load(operand.again_table + again)
    if operand.outer_table is None:
        at = at[:, None] + (o * operand.outer_step)[None, :]
    else:
        at = at[:, None] + tl.load(operand.outer_table + o, mask=in_outer, other=0)[None, :]
    at = at[:, :, None]
    if operand.inner is not None:
        at = at + i[None, None, :]
    return at


@kernel
def _values(operand, at, inside, inside_inner, SUM: tl.constexpr):
    """Elements of an operand, 0 where there are none."""
    if operand.inner is not None:
        inside = inside & inside_inner
    return tl.load(operand.data + at, mask=inside, other=0).to(SUM)


@kernel
def _rows(edges, p, here, own, OF: tl.constexpr):
    """The rows of the edges p in an operand."""
    if OF == "own":
        rows = own + tl.zeros_like(p).to(tl.int64)
    elif OF == "other":
        rows = other_rows(edges, p, here)
    else:
        rows = edge_rows(edges, p, here)
    return rows


@kernel
def _messages(
    edges, a, b, c, arg, sizes, own, p, here, o, i,
    OP: tl.constexpr, A_OF: tl.constexpr, B_OF: tl.constexpr, C_OF: tl.constexpr, ADDS_INNER: tl.constexpr,
    EDGES: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """The messages of the edges p where `here`: elements o and i, (EDGES, OUTER, INNER), else 0.

    With ADDS_INNER sums over all i, (EDGES, OUTER, 1).
    """
    outer, repeats, inner = sizes
    inside = (here[:, None] & (o < outer)[None, :])[:, :, None]
    total = tl.zeros((EDGES, OUTER, 1 if ADDS_INNER else INNER), SUM)
    for step in range(repeats * (tl.cdiv(inner, INNER) if ADDS_INNER else 1)):
        again = step % repeats
        if ADDS_INNER:
            i = (step // repeats) * INNER + tl.arange(0, INNER)
        inside_inner = (i < inner)[None, None, :]
        a_at = _at(a, _rows(edges, p, here, own, A_OF), o, o < outer, again, i)
        value = _values(a, a_at, inside, inside_inner, SUM)
        if b is not None:
            b_at = _at(b, _rows(edges, p, here, own, B_OF), o, o < outer, again, i)
            other = _values(b, b_at, inside, inside_inner, SUM)
        if OP == "negate":
            value = -value
        elif OP == "add":
            value = value + other
        elif OP == "sub":
            value = value - other
        elif OP == "mul":
            value = value * other
        elif OP == "div":
            value = value / other
        elif OP == "div_rhs":
            c_at, c_inside = _of_result(sizes, _rows(edges, p, here, own, C_OF), here, o, i, ADDS_INNER)
            divisor = tl.load(c + c_at, mask=c_inside, other=1).to(SUM)
            value = -value * other / (divisor * divisor)
        valid = inside & inside_inner
        if arg is not None:  # of which only the winner's message counts
            winner = tl.load(arg + a_at, mask=inside if a.inner is None else valid, other=-1)
            valid = valid & (winner == edge_rows(edges, p, here)[:, None, None])
        value = tl.where(valid, value, 0.0)
        total += tl.sum(value, 2, keep_dims=True) if ADDS_INNER else value
    return total


@kernel
def _of_result(sizes, rows, here, o, i, ADDS_INNER: tl.constexpr):
    """The offsets of rows' elements in a result, (rows, OUTER, INNER) or (rows, OUTER, 1), and a mask of them."""
    outer, _, inner = sizes
    at = (rows[:, None] * outer + o[None, :])[:, :, None]
    inside = (here[:, None] & (o < outer)[None, :])[:, :, None]
    if not ADDS_INNER:
        at = at * inner + i[None, None, :]
        inside = inside & (i < inner)[None, None, :]
    return at, inside


@kernel
def sum_kernel(
    edges, a, b, c, arg, sizes, out,
    OP: tl.constexpr, A_OF: tl.constexpr, B_OF: tl.constexpr, ADDS_INNER: tl.constexpr,
    EDGES: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Add the messages of a group's edges to its row of out."""
    group = tl.program_id(0)
    begin, end = bounds(edges, group)
    if begin < end:
        own = own_row(edges, group)
        o, i = tl.program_id(1) * OUTER + tl.arange(0, OUTER), tl.program_id(2) * INNER + tl.arange(0, INNER)
        total = tl.zeros((EDGES, OUTER, 1 if ADDS_INNER else INNER), SUM)
        for first in range(begin, end, EDGES):  # threads wait for each other at the end only
            p = first + tl.arange(0, EDGES)
            total += _messages(
                edges, a, b, c, arg, sizes, own, p, p < end, o, i,
                OP, A_OF, B_OF, "own", ADDS_INNER, EDGES, OUTER, INNER, SUM,
            )  # fmt: skip
        row = result_row(edges, group, own) + tl.arange(0, 1)
        at, inside = _of_result(sizes, row, row == row, o, i, ADDS_INNER)
        total = tl.load(out + at, mask=inside, other=0).to(SUM) + tl.sum(total, 0, keep_dims=True)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@kernel
def write_kernel(
    edges, a, b, c, arg, sizes, out,
    ADDS: tl.constexpr, OP: tl.constexpr, A_OF: tl.constexpr, B_OF: tl.constexpr, ADDS_INNER: tl.constexpr,
    EDGES: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Write the messages of a group's edges to the edges' rows of out, or add them."""
    group = tl.program_id(0)
    begin, end = bounds(edges, group)
    own = own_row(edges, group)
    o, i = tl.program_id(1) * OUTER + tl.arange(0, OUTER), tl.program_id(2) * INNER + tl.arange(0, INNER)
    for first in range(begin, end, EDGES):
        p = first + tl.arange(0, EDGES)
        value = _messages(
            edges, a, b, c, arg, sizes, own, p, p < end, o, i,
            OP, A_OF, B_OF, "edge", ADDS_INNER, EDGES, OUTER, INNER, SUM,
        )  # fmt: skip
        at, inside = _of_result(sizes, edge_rows(edges, p, p < end), p < end, o, i, ADDS_INNER)
        if ADDS:
            value += tl.load(out + at, mask=inside, other=0).to(SUM)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@kernel
def compare_kernel(
    edges, a, b, c, arg, sizes, out, best_ids, given,
    LARGEST: tl.constexpr, WORST: tl.constexpr,
    OP: tl.constexpr, A_OF: tl.constexpr, B_OF: tl.constexpr, ADDS_INNER: tl.constexpr,
    EDGES: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Keep the greatest (least) message of a group's edges, and the greatest ID of those that have it; never NaN.

    The IDs are `given`, by other rows, where those are.
    """
    group = tl.program_id(0)
    begin, end = bounds(edges, group)
    own = own_row(edges, group)
    o, i = tl.program_id(1) * OUTER + tl.arange(0, OUTER), tl.program_id(2) * INNER + tl.arange(0, INNER)
    tops = tl.full((EDGES, OUTER, 1 if ADDS_INNER else INNER), WORST, SUM)
    top_ids = tl.full((EDGES, OUTER, 1 if ADDS_INNER else INNER), -1, tl.int64)
    for first in range(begin, end, EDGES):
        p = first + tl.arange(0, EDGES)
        value = _messages(
            edges, a, b, c, arg, sizes, own, p, p < end, o, i,
            OP, A_OF, B_OF, "own", ADDS_INNER, EDGES, OUTER, INNER, SUM,
        )  # fmt: skip
        if given is None:
            ids = edge_rows(edges, p, p < end)[:, None, None]
        else:
            at, inside = _of_result(sizes, other_rows(edges, p, p < end), p < end, o, i, ADDS_INNER)
            ids = tl.load(given + at, mask=inside, other=-1).to(tl.int64)
        better = (value > tops) if LARGEST else (value < tops)
        better = (p < end)[:, None, None] & (better | ((value == tops) & (ids > top_ids)))
        tops = tl.where(better, value, tops)
        top_ids = tl.where(better, ids, top_ids)

    row = result_row(edges, group, own) + tl.arange(0, 1)
    at, inside = _of_result(sizes, row, row == row, o, i, ADDS_INNER)
    best = tl.load(out + at, mask=inside, other=WORST).to(SUM)
    best_id = tl.load(best_ids + at, mask=inside, other=-1).to(tl.int64)
    top = tl.max(tops, 0, keep_dims=True) if LARGEST else tl.min(tops, 0, keep_dims=True)
    top_id = tl.max(tl.where(tops == top, top_ids, -1), 0, keep_dims=True)
    better = (top > best) if LARGEST else (top < best)
    better = better | ((top == best) & (top_id > best_id))
    tl.debug_barrier()  # several threads may have read an element, and all of them before it changes
    tl.store(out + at, tl.where(better, top, best).to(out.dtype.element_ty), mask=inside)
    tl.store(best_ids + at, tl.where(better, top_id, best_id).to(best_ids.dtype.element_ty), mask=inside)


@kernel
def add_row(rows, values, out, width, COLUMNS: tl.constexpr, SUM: tl.constexpr):
    """Add a row of values to one of out."""
    i = tl.program_id(0)
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    to = out + tl.load(rows + i).to(tl.int64) * width + k
    value = tl.load(values + i.to(tl.int64) * width + k, mask=k < width, other=0).to(SUM)
    tl.store(to, (tl.load(to, mask=k < width, other=0).to(SUM) + value).to(out.dtype.element_ty), mask=k < width)
