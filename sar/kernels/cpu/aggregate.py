"""Compiled aggregations: which loop of `sar.kernels.cpu.aggregate_loops` runs on which arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from sar.kernels.cpu import aggregate_loops as loops
from sar.kernels.cpu.aggregate_loops import Formula, Table, make_layout
from sar.kernels.cpu.csr_view import EDGE, NO_INDICES, OTHER, OWN, CSRView, by_destination, by_source
from sar.kernels.edge_block import EdgeBlock
from sar.kernels.ops import EdgeMessage, EdgeOperand, Op, Target, aligned_message_shape
from sar.kernels.threads import run_balanced
from sar.raw_memory import flat

_BY_DESTINATION = {Target.U: OTHER, Target.V: OWN, Target.E: EDGE}
_BY_SOURCE = {Target.U: OWN, Target.V: OTHER, Target.E: EDGE}

_OPERATIONS = {  # compiled operation and its sign
    Op.COPY: (loops.COPY, 1),
    Op.ADD: (loops.ADD, 1),
    Op.SUB: (loops.ADD, -1),
    Op.MUL: (loops.MUL, 1),
    Op.DIV: (loops.DIV, 1),
    Op.DOT: (loops.MUL, 1),
}


def aggregate_sum(block: EdgeBlock, message: EdgeMessage, out: Tensor) -> None:
    """Compiled kernel of `sar.kernels.aggregate_sum`."""
    csr = by_destination(block, with_edges=_of_edges(*message.operands))
    formula, *operands = _operands(message)
    _run(_adding(formula), csr, formula, *operands, Table(flat(out), OWN))


def aggregate_cmp(block: EdgeBlock, message: EdgeMessage, out: Tensor, arg: Tensor, largest: bool) -> None:
    """Compiled kernel of `sar.kernels.aggregate_cmp`."""
    _run(loops.compare, by_destination(block), *_operands(message), Table(flat(out), OWN), flat(arg), largest)


def edge_apply(block: EdgeBlock, message: EdgeMessage, out: Tensor) -> None:
    """Compiled kernel of `sar.kernels.edge_apply`."""
    _run(loops.assign, by_destination(block), *_operands(message), Table(flat(out), EDGE))


def aggregate_grad(
    block: EdgeBlock, message: EdgeMessage, wrt: str, grad: EdgeOperand, out: Tensor, arg: Tensor | None
) -> None:
    """Compiled kernel of `sar.kernels.aggregate_grad`.

    A derivative is again an operation on two operands, the gradient of the messages and the other operand of the
    forward, whose result is summed where the operand in question was broadcast.
    """
    lhs_aligned, rhs_aligned, full = message.aligned_shapes()
    grad_aligned = aligned_message_shape(message.op, full)
    code, sign = _OPERATIONS[message.op]
    operand = message.operand(wrt)
    if wrt == "lhs":
        aligned, other, other_aligned = lhs_aligned, message.rhs, rhs_aligned
    else:
        aligned, other, other_aligned = rhs_aligned, message.lhs, lhs_aligned
        code = loops.DIV_RHS if message.op is Op.DIV else code
    if message.op in (Op.COPY, Op.ADD, Op.SUB):
        code, sign = loops.COPY, sign if wrt == "rhs" else 1
        other, other_aligned = grad, grad_aligned  # not read
    assert other is not None
    formula = Formula(code, sign, make_layout(full, grad_aligned, other_aligned, aligned))
    # Grouped by destination, several threads would write to one source's row.
    of_sources = operand.target is Target.U
    group, whose = (by_source, _BY_SOURCE) if of_sources else (by_destination, _BY_DESTINATION)
    csr = group(block, with_edges=arg is not None or _of_edges(*message.operands, grad))
    a = Table(flat(grad.values), whose[grad.target])
    b = Table(flat(other.values), whose[other.target])
    to = Table(flat(out), whose[operand.target])
    if arg is None and code != loops.DIV_RHS:
        _run(_adding(formula), csr, formula, a, b, to)
    else:
        denominator = flat(operand.values) if code == loops.DIV_RHS else to.values  # else not read
        edge_ids = NO_INDICES if arg is None else flat(arg)
        _run(loops.accumulate_where, csr, formula, a, b, to, denominator, Table(edge_ids, a.whose))


def add_rows(rows: Tensor, values: Tensor, out: Tensor) -> None:
    """Compiled kernel of `sar.kernels.add_rows`."""
    loops.add_rows(flat(rows), flat(values), flat(out), np.uint64(values.shape[1:].numel()))


def _adding(formula: Formula) -> Any:
    return loops.accumulate if formula.op in (loops.COPY, loops.MUL) else loops.accumulate_others


def _run(kernel: Any, csr: CSRView, formula: Formula, *arguments: object) -> None:
    width = int(formula.layout.length) * len(formula.layout.a_offsets)
    run_balanced(kernel, csr.indptr, width, csr, formula, *arguments)


def _operands(message: EdgeMessage) -> tuple[Formula, Table, Table]:
    """What a kernel over destinations computes of which operands."""
    lhs_aligned, rhs_aligned, full = message.aligned_shapes()
    lhs, rhs = message.lhs, message.rhs
    if rhs is None:
        rhs, rhs_aligned = lhs, lhs_aligned  # not read
    layout = make_layout(full, lhs_aligned, rhs_aligned, aligned_message_shape(message.op, full))
    a, b = (Table(flat(operand.values), _BY_DESTINATION[operand.target]) for operand in (lhs, rhs))
    return Formula(*_OPERATIONS[message.op], layout), a, b


def _of_edges(*operands: EdgeOperand) -> bool:
    """Whether one of the operands has rows of edges."""
    return any(operand.target is Target.E for operand in operands)
