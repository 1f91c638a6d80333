"""Aggregation with Triton: which kernel of `aggregate_kernels.py` runs on which tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from sar.kernels.edge_block import EdgeBlock
from sar.kernels.ops import EdgeMessage, EdgeOperand, Op, Shape, Target, aligned_message_shape
from sar.kernels.triton.aggregate_kernels import add_row, compare_kernel, sum_kernel, write_kernel
from sar.kernels.triton.edges import Edges, Grouping, at_once, by_destination, by_source, launch, ready, sum_type, warps

_BY_DESTINATION = {Target.U: "other", Target.V: "own", Target.E: "edge"}
_BY_SOURCE = {Target.U: "own", Target.V: "other", Target.E: "edge"}


class Operand(NamedTuple):
    """An operand of the messages, as kernels take it.

    Its rows are seen as (outer, again, inner): see `_Parts`. An element lies at the sum of its offsets by `outer` and
    `again`, which are step * index, or in a table, and its index in `inner`, unless it is the same for all of these.
    """

    data: Tensor
    width: int  # elements in a row
    inner: int | None  # 1; None: the same for all of `inner`
    outer_table: Tensor | None  # (outer,)
    outer_step: int
    again_table: Tensor | None  # (again,)
    again_step: int


class Formula(NamedTuple):
    """The computation at each edge: op(a, b), or op(a, b, c), where `c` is laid out as the result.

    If `arg`, laid out as `a`, is given, only at edges whose ID it is.
    """

    op: str
    sizes: tuple[int, int, int]  # of outer, again and inner
    adds_inner: bool
    a: Operand
    b: Operand | None
    a_of: str  # whose rows: "own", "other", "edge"
    b_of: str
    c: Tensor | None = None
    arg: Tensor | None = None


def aggregate_sum(block: EdgeBlock, message: EdgeMessage, out: Tensor, fresh: bool = False) -> None:
    """Triton kernel of `sar.kernels.aggregate_sum`."""
    if fresh:
        out.zero_()
    grouping, formula = by_destination(block, with_edges=message.reads_edges), _formula(message)
    in_pieces(grouping, [out], lambda edges, sums: _run(sum_kernel, edges, formula, *sums))


def aggregate_cmp(block: EdgeBlock, message: EdgeMessage, out: Tensor, arg: Tensor, largest: bool) -> None:
    """Triton kernel of `sar.kernels.aggregate_cmp`."""
    _compare(by_destination(block), _formula(message), out, arg, None, largest)


def edge_apply(block: EdgeBlock, message: EdgeMessage, out: Tensor) -> None:
    """Triton kernel of `sar.kernels.edge_apply`."""
    _write(by_destination(block), _formula(message), out, adds=False)


def aggregate_grad(
    block: EdgeBlock, message: EdgeMessage, wrt: str, grad: EdgeOperand, out: Tensor, arg: Tensor | None,
    fresh: bool = False,
) -> None:  # fmt: skip
    """Triton kernel of `sar.kernels.aggregate_grad`.

    A derivative is again an operation on two operands, the gradient of the messages and the other operand of the
    forward, whose result is summed over dimensions that broadcast the operand in question.
    """
    if fresh:
        out.zero_()
    lhs_aligned, rhs_aligned, full = message.aligned_shapes()
    operand, op = message.operand(wrt), message.op
    codes = {Op.DIV: "div", Op.MUL: "mul", Op.DOT: "mul"}
    aligned, other, other_aligned = lhs_aligned, message.rhs, rhs_aligned
    if wrt == "rhs":
        aligned, other, other_aligned = rhs_aligned, message.lhs, lhs_aligned
        codes |= {Op.DIV: "div_rhs", Op.SUB: "negate"}
    group, whose = (by_source, _BY_SOURCE) if operand.target is Target.U else (by_destination, _BY_DESTINATION)
    given = (grad, aligned_message_shape(op, full)), (other, other_aligned)
    formula = _laid_out(codes.get(op, "copy"), full, aligned, *given, whose)
    formula = formula._replace(arg=None if arg is None else ready(arg))
    if formula.op == "div_rhs":
        assert operand.values is not None
        formula = formula._replace(c=ready(operand.values))
    grouping = group(block, with_edges=arg is not None or message.reads_edges or grad.target is Target.E)
    if operand.target is Target.E:
        _write(grouping, formula, out, adds=True)
    else:
        in_pieces(grouping, [out], lambda edges, sums: _run(sum_kernel, edges, formula, *sums))


def add_rows(rows: Tensor, values: Tensor, out: Tensor) -> None:
    """Triton kernel of `sar.kernels.add_rows`."""
    width = values.shape[1:].numel()
    columns = min(triton.next_power_of_2(width), 1024)
    grid = len(rows), triton.cdiv(width, columns)
    constants = {"COLUMNS": columns, "SUM": sum_type(out)}
    launch(add_row, grid, out, ready(rows), ready(values), out, width, num_warps=warps(columns), **constants)


def in_pieces(grouping: Grouping, sums: list[Tensor], run: Callable[[Edges, list[Tensor]], None]) -> None:
    """Let `run` add the results of each group's edges to its rows of `sums`; see [Note: hubs]."""
    run(grouping.edges, sums)
    if grouping.hubs is not None:
        edges, block = grouping.hubs
        parts = [whole.new_zeros(edges.groups, *whole.shape[1:]) for whole in sums]
        run(edges, parts)
        for part, whole in zip(parts, sums, strict=True):
            aggregate_sum(block, copy_of_sources(part), whole)


def _compare(
    grouping: Grouping, formula: Formula, out: Tensor, arg: Tensor, given: Tensor | None, largest: bool
) -> None:
    """Keep the greatest (least) message of each group; `given` are edge IDs in place of those of the edges."""
    constants = {"LARGEST": largest, "WORST": -torch.inf if largest else torch.inf}
    _run(compare_kernel, grouping.edges, formula, out, arg, given, **constants)
    if grouping.hubs is not None:
        edges, block = grouping.hubs
        parts = out.new_full((edges.groups, *out.shape[1:]), constants["WORST"])
        ids = arg.new_full(parts.shape, -1)
        _run(compare_kernel, edges, formula, parts, ids, given, **constants)
        _compare(by_destination(block), _formula(copy_of_sources(parts)), out, arg, ids, largest)


def _write(grouping: Grouping, formula: Formula, out: Tensor, *, adds: bool) -> None:
    """Write the message of each edge to its row of out, or add it there."""
    for edges in (grouping.edges, *([] if grouping.hubs is None else [grouping.hubs.edges])):
        _run(write_kernel, edges, formula, out, ADDS=adds)


def _run(run: Any, edges: Edges, formula: Formula, out: Tensor, *others: Tensor | None, **constants: object) -> None:
    """Launch a kernel over groups and elements of a result's row."""
    inner = min(triton.next_power_of_2(formula.sizes[2]), 128)
    outer = min(triton.next_power_of_2(formula.sizes[0]), 128 // inner)
    edges_at_once = at_once(outer * inner, 32)
    blocks = triton.cdiv(formula.sizes[0], outer), 1 if formula.adds_inner else triton.cdiv(formula.sizes[2], inner)
    operands = formula.a, formula.b, formula.c, formula.arg, formula.sizes, out, *others
    constants |= {"OP": formula.op, "A_OF": formula.a_of, "B_OF": formula.b_of, "ADDS_INNER": formula.adds_inner}
    constants |= {"EDGES": edges_at_once, "OUTER": outer, "INNER": inner, "SUM": sum_type(out)}
    num_warps = warps(edges_at_once * outer * inner)
    launch(run, (edges.groups, *blocks), out, edges, *operands, num_warps=num_warps, **constants)


def copy_of_sources(values: Tensor) -> EdgeMessage:
    """The message that is the row of its edge's source."""
    return EdgeMessage(Op.COPY, EdgeOperand.of(values, Target.U))


def _formula(message: EdgeMessage) -> Formula:
    """The computation of a kernel over destinations."""
    lhs_aligned, rhs_aligned, full = message.aligned_shapes()
    code = {Op.COPY: "copy", Op.DOT: "mul"}.get(message.op, message.op.value)
    aligned = aligned_message_shape(message.op, full)
    return _laid_out(code, full, aligned, (message.lhs, lhs_aligned), (message.rhs, rhs_aligned), _BY_DESTINATION)


def _laid_out(
    code: str,
    full: Shape,
    out: Shape,
    a: tuple[EdgeOperand, Shape],
    b: tuple[EdgeOperand | None, Shape],
    whose: dict[Target, str],
) -> Formula:
    """The formula of operands with aligned shapes for a result of the aligned shape `out`."""
    b_operand, b_shape = a if code in ("copy", "negate") or b[0] is None else (b[0], b[1])
    parts = _parts(full, a[1], b_shape, out)
    laid_a, laid_b = _operand(*a, parts), None if b_operand is a[0] else _operand(b_operand, b_shape, parts)
    return Formula(code, parts.sizes, parts.adds_inner, laid_a, laid_b, whose[a[0].target], whose[b_operand.target])


class _Parts(NamedTuple):
    """The dimensions of a product space: those of the result, those that are added up, and the last ones.

    Of the last ones, `inner`, each operand and the result has all or none: `adds_inner`, the result has none.
    """

    full: Shape
    outer: Shape
    again: Shape
    inner: Shape
    adds_inner: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Elements in outer, again and inner."""
        outer, again, inner = (prod(self.full[i] for i in dims) for dims in self[1:4])
        return outer, again, inner


@lru_cache(maxsize=1024)
def _parts(full: Shape, a: Shape, b: Shape, out: Shape) -> _Parts:
    """The dimensions of operands with shapes a, b and out of equal length that broadcast to `full`."""
    start, pattern = len(full), None
    while start > 0:
        if full[start - 1] != 1:
            present = tuple(shape[start - 1] != 1 for shape in (a, b, out))
            if pattern not in (None, present):
                break
            pattern = present
        start -= 1
    again = tuple(i for i in range(start) if out[i] != full[i])
    outer, inner = tuple(i for i in range(start) if i not in again), tuple(range(start, len(full)))
    return _Parts(full, outer, again, inner, pattern is not None and not pattern[2])


def _operand(operand: EdgeOperand, shape: Shape, parts: _Parts) -> Operand:
    assert operand.values is not None
    data = ready(operand.values)
    return Operand(data, prod(shape), *_offsets(parts, shape, data.device))


@lru_cache(maxsize=1024)
def _offsets(
    parts: _Parts, shape: Shape, device: torch.device
) -> tuple[int | None, Tensor | None, int, Tensor | None, int]:
    """The offsets of an `Operand` of this shape."""
    places = np.broadcast_to(np.arange(prod(shape), dtype=np.int32).reshape(shape), parts.full)
    places = places.transpose(parts.outer + parts.again + parts.inner).reshape(parts.sizes)
    repeated = parts.sizes[2] > 1 and places[0, 0, 1] == 0
    return None if repeated else 1, *_table_or_step(places[:, 0, 0], device), *_table_or_step(places[0, :, 0], device)


def _table_or_step(offsets: Any, device: torch.device) -> tuple[Tensor | None, int]:
    step = int(offsets[1]) if len(offsets) > 1 else 0  # which keeps rows aligned
    if (offsets == step * np.arange(len(offsets))).all():
        return None, step
    return torch.from_numpy(offsets.copy()).to(device), 0
