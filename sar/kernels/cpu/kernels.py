"""The backend's functions: which compiled loop runs on which arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sar.kernels.attention_operands import Attention, AttentionOperands, Gradients, OnlineSoftmaxState, Score
from sar.kernels.cpu import aggregate_loops as loops
from sar.kernels.cpu import attention_loops
from sar.kernels.cpu.aggregate_loops import Formula, Table, make_layout
from sar.kernels.cpu.attention_loops import CHUNK, Heads, Incoming, Scored, Scratch, SourceGradients, Sums
from sar.kernels.cpu.csr_view import EDGE, NO_INDICES, OTHER, OWN, CSRView, by_destination, by_source
from sar.kernels.edge_block import EdgeBlock
from sar.kernels.ops import EdgeMessage, EdgeOperand, Op, Target, aligned_message_shape
from sar.kernels.threads import run_balanced, run_rows
from sar.tensor_views import as_numpy

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
    _add(csr, *_operands(message), Table(as_numpy(out), OWN))


def aggregate_cmp(block: EdgeBlock, message: EdgeMessage, out: Tensor, arg: Tensor, largest: bool) -> None:
    """Compiled kernel of `sar.kernels.aggregate_cmp`."""
    _run(loops.compare, by_destination(block), *_operands(message), Table(as_numpy(out), OWN), as_numpy(arg), largest)


def edge_apply(block: EdgeBlock, message: EdgeMessage, out: Tensor) -> None:
    """Compiled kernel of `sar.kernels.edge_apply`."""
    _run(loops.assign, by_destination(block), *_operands(message), Table(as_numpy(out), EDGE))


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
    a = Table(as_numpy(grad.values), whose[grad.target])
    b = Table(as_numpy(other.values), whose[other.target])
    to = Table(as_numpy(out), whose[operand.target])
    if arg is None and code != loops.DIV_RHS:
        _add(csr, formula, a, b, to)
    else:
        denominator = as_numpy(operand.values) if code == loops.DIV_RHS else to.values  # else not read
        edge_ids = NO_INDICES if arg is None else as_numpy(arg)
        _run(loops.accumulate_where, csr, formula, a, b, to, denominator, Table(edge_ids, a.whose))


def add_rows(rows: Tensor, values: Tensor, out: Tensor) -> None:
    """Compiled kernel of `sar.kernels.add_rows`."""
    loops.add_rows(as_numpy(rows), as_numpy(values), as_numpy(out), np.uint64(values.shape[1:].numel()))


def _add(csr: CSRView, formula: Formula, a: Table, b: Table, out: Table) -> None:
    op, layout = formula.op, formula.layout
    by_rows = a.whose == OTHER and out.whose == OWN and layout.a_step and layout.out_step
    if by_rows and (op == loops.COPY or (op == loops.MUL and not layout.b_step)):
        kernel = loops.accumulate_rows
    else:
        kernel = loops.accumulate if op in (loops.COPY, loops.MUL) else loops.accumulate_others
    _run(kernel, csr, formula, a, b, out)


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
    a, b = (Table(as_numpy(operand.values), _BY_DESTINATION[operand.target]) for operand in (lhs, rhs))
    return Formula(*_OPERATIONS[message.op], layout), a, b


def _of_edges(*operands: EdgeOperand) -> bool:
    """Whether one of the operands has rows of edges."""
    return any(operand.target is Target.E for operand in operands)


# -- attention


def attend(block: EdgeBlock, how: Attention, operands: AttentionOperands, state: OnlineSoftmaxState) -> None:
    """Compiled kernel of `sar.kernels.attention.attend`."""
    csr, x = by_destination(block, with_edges=_reads_edges(how, operands)), as_numpy(operands.x)
    width = operands.x.shape[1:].numel()
    x_score = x if operands.x_score is None else as_numpy(operands.x_score)
    scored = Scored(as_numpy(operands.y), x_score, _flat(operands.attn, x))
    arguments = _heads(how, operands.x), x, scored, _flat(operands.weight, x), Sums(*map(as_numpy, state))
    run_balanced(attention_loops.attend, csr.indptr, width, csr, *arguments, private=partial(_scratch, operands.x, x))


def head_sums(how: Attention, grad: Tensor, out: Tensor, stats: Tensor) -> None:
    """Write the sums of grad * out over each head to stats[:, GRAD_DOT]."""
    operands = _heads(how, grad), as_numpy(grad), as_numpy(out), as_numpy(stats)
    run_rows(attention_loops.head_sums, len(grad), grad.shape[1:].numel(), *operands)


def project(x: Tensor, attn: Tensor) -> Tensor:
    """Compiled kernel of `sar.kernels.attention.project`."""
    _, heads, dim = x.shape
    out = x.new_empty(len(x), heads)
    shape = np.uint64(heads), np.uint64(dim)
    run_rows(attention_loops.project, len(x), heads * dim, *shape, as_numpy(x), as_numpy(attn), as_numpy(out))
    return out


def project_grad(x: Tensor, attn: Tensor, grad: Tensor, x_grad: Tensor, attn_grad: Tensor) -> None:
    """Compiled kernel of `sar.kernels.attention.project_grad`."""
    _, heads, dim = x.shape
    parts = _Parts(attn_grad)
    operands = np.uint64(heads), np.uint64(dim), as_numpy(x), as_numpy(attn), as_numpy(grad), as_numpy(x_grad)
    run_rows(attention_loops.project_grad, len(x), heads * dim, *operands, private=parts.another)
    parts.add_up()


def attend_grad(
    block: EdgeBlock, how: Attention, operands: AttentionOperands, grad: Tensor, stats: Tensor, grads: Gradients
) -> None:
    """Compiled kernel of `sar.kernels.attention.attend_grad`; see `Backend`."""
    additive, reads_edges = how.score is Score.ADDITIVE, _reads_edges(how, operands)
    x, heads, width = as_numpy(operands.x), _heads(how, operands.x), operands.x.shape[1:].numel()
    x_score = x if operands.x_score is None else as_numpy(operands.x_score)
    attn, weight = _flat(operands.attn, x), _flat(operands.weight, x)
    incoming = Incoming(as_numpy(grad), as_numpy(stats))
    y = incoming.stats if additive else as_numpy(operands.y)

    csr = by_source(block, with_edges=reads_edges)
    results = SourceGradients(*(_flat(tensor, x) for tensor in (grads.x, grads.x_score, grads.weight)))
    parts = _Parts(grads.y if additive else grads.x[:0])
    private = partial(_private, parts, operands.x, x)
    to_sources = csr, heads, x, Scored(x_score, y, attn), weight, incoming, results
    run_balanced(attention_loops.source_gradients, csr.indptr, width, *to_sources, private=private)
    parts.add_up()
    if additive:
        return

    csr = by_destination(block, with_edges=reads_edges)
    parts = _Parts(grads.attn if grads.attn is not None else grads.x[:0])
    private = partial(_private, parts, operands.x, x)
    to_destinations = csr, heads, x, Scored(y, x, attn), weight, incoming, as_numpy(grads.y)
    run_balanced(attention_loops.destination_gradients, csr.indptr, width, *to_destinations, private=private)
    parts.add_up()


def _scratch(of: Tensor, x: NDArray[Any]) -> list[object]:
    """Working memory of one thread, for features as a tensor and as an array."""
    return [Scratch(*np.empty((5, CHUNK * of.shape[1]), x.dtype), *np.empty((4, CHUNK + 1), np.uint64))]


def _private(parts: _Parts, of: Tensor, x: NDArray[Any]) -> list[object]:
    return [*parts.another(), *_scratch(of, x)]


def _flat(tensor: Tensor | None, like: NDArray[Any]) -> NDArray[Any]:
    """As `as_numpy`; of None an empty array of the same dtype, because kernels are compiled by dtype."""
    return like[:0] if tensor is None else as_numpy(tensor)


def _reads_edges(how: Attention, operands: AttentionOperands) -> bool:
    """Whether edge IDs matter: to dropout, and to find weights."""
    return how.dropout > 0 or operands.weight is not None


class _Parts:
    """A sum to which each thread adds in a tensor of its own."""

    def __init__(self, total: Tensor) -> None:
        self._total = total
        self._parts: list[Tensor] = []

    def another(self) -> list[NDArray[Any]]:
        """The tensor of one more thread; the first adds to the total itself."""
        part = torch.zeros_like(self._total) if self._parts else self._total
        self._parts.append(part)
        return [as_numpy(part)]

    def add_up(self) -> None:
        """Bring the other threads' parts into the total."""
        for part in self._parts[1:]:
            self._total += part


def _heads(how: Attention, x: Tensor) -> Heads:
    _, heads, dim = x.shape
    keep = 1 - how.dropout
    drop, scale = round(how.dropout * 2**32), 1 / keep if keep > 0 else 0.0
    return Heads(
        int(how.score), np.uint64(heads), np.uint64(dim), how.factor, np.uint64(how.seed), np.uint64(drop), scale
    )
