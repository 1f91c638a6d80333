"""The functions of the backend: each chooses a compiled loop and passes it the arrays of its tensors."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sar.kernels.cpu import aggregate_loops as loops
from sar.kernels.cpu import attention_loops
from sar.kernels.cpu.aggregate_loops import Formula, Table, make_layout
from sar.kernels.cpu.attention_loops import CHUNK, Heads, Incoming, Scored, Scratch, SourceGradients, Sums
from sar.kernels.cpu.csr_view import EDGE, NO_INDICES, OTHER, OWN, CSRView, view
from sar.kernels.edge_block import EdgeBlock
from sar.kernels.ops import (
    Attention,
    AttentionOperands,
    EdgeMessage,
    EdgeOperand,
    Gradients,
    OnlineSoftmaxState,
    Op,
    Score,
    Target,
)
from sar.kernels.threads import run_balanced
from sar.tensors.views import as_numpy

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


def aggregate_sum(block: EdgeBlock, message: EdgeMessage, out: Tensor, fresh: bool = False) -> None:
    """Compiled kernel of `sar.kernels.aggregate_sum`."""
    _add(view(block, with_edges=message.reads_edges), *_operands(message), out, OWN, fresh)


def aggregate_cmp(block: EdgeBlock, message: EdgeMessage, out: Tensor, arg: Tensor, largest: bool) -> None:
    """Compiled kernel of `sar.kernels.aggregate_cmp`."""
    csr, (formula, a, b), to = view(block), _operands(message), Table(as_numpy(out), OWN)
    run_balanced(loops.compare, csr.indptr, formula.layout.size, csr, formula, a, b, to, as_numpy(arg), largest)


def edge_apply(block: EdgeBlock, message: EdgeMessage, out: Tensor) -> None:
    """Compiled kernel of `sar.kernels.edge_apply`."""
    csr, (formula, a, b), to = view(block), _operands(message), Table(as_numpy(out), EDGE)
    run_balanced(loops.assign, csr.indptr, formula.layout.size, csr, formula, a, b, to)


def aggregate_grad(
    block: EdgeBlock, message: EdgeMessage, wrt: str, grad: EdgeOperand, out: Tensor, arg: Tensor | None,
    fresh: bool = False,
) -> None:  # fmt: skip
    """Compiled kernel of `sar.kernels.aggregate_grad`.

    A derivative is again an operation on two operands, the gradient of the messages and the other operand of the
    forward, whose result is summed over dimensions that broadcast the operand in question.
    """
    lhs_aligned, rhs_aligned, full, grad_aligned = message.aligned
    code, sign = _OPERATIONS[message.op]
    operand = message.operands[wrt == "rhs"]
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
    with_edges = arg is not None or message.reads_edges or grad.target is Target.E
    csr, whose = view(block, by_source=of_sources, with_edges=with_edges), _BY_SOURCE if of_sources else _BY_DESTINATION
    a = b = Table(as_numpy(grad.values), whose[grad.target])
    if other is not grad:
        b = Table(as_numpy(other.values), whose[other.target])
    if arg is None and code != loops.DIV_RHS:
        _add(csr, formula, a, b, out, whose[operand.target], fresh)
    else:
        to = Table(as_numpy(out.zero_() if fresh else out), whose[operand.target])
        denominator = as_numpy(operand.values) if code == loops.DIV_RHS else to.values  # else not read
        edge_ids = NO_INDICES if arg is None else as_numpy(arg)
        given = csr, formula, a, b, to, denominator, Table(edge_ids, a.whose)
        run_balanced(loops.accumulate_where, csr.indptr, formula.layout.size, *given)


def add_rows(rows: Tensor, values: Tensor, out: Tensor) -> None:
    """Compiled kernel of `sar.kernels.add_rows`."""
    loops.add_rows(as_numpy(rows), as_numpy(values), as_numpy(out), np.uint64(values.shape[1:].numel()))


def _add(csr: CSRView, formula: Formula, a: Table, b: Table, out: Tensor, whose: int, fresh: bool) -> None:
    op, layout = formula.op, formula.layout
    by_rows = a.whose == OTHER and whose == OWN and layout.a_step and layout.out_step
    by_rows = by_rows and ((op == loops.COPY and formula.sign == 1) or (op == loops.MUL and not layout.b_step))
    # Only a kernel that writes each element once can do without zeros; runs may share elements that are broadcast.
    writes = by_rows and layout.out_width == layout.length * len(layout.out_offsets)
    to = Table(as_numpy(out.zero_() if fresh and not writes else out), whose)
    given = csr.indptr, layout.size, csr, formula, a, b, to
    if by_rows:
        run_balanced(loops.accumulate_rows, *given, fresh and bool(writes))
    else:
        run_balanced(loops.accumulate if op in (loops.COPY, loops.MUL) else loops.accumulate_others, *given)


def _operands(message: EdgeMessage) -> tuple[Formula, Table, Table]:
    """The operation of a kernel over destinations, and its operands."""
    formula = message.kept.get("formula")
    if formula is None:
        lhs_aligned, rhs_aligned, full, aligned = message.aligned
        layout = make_layout(full, lhs_aligned, rhs_aligned or lhs_aligned, aligned)
        formula = message.kept["formula"] = Formula(*_OPERATIONS[message.op], layout)
    a = Table(as_numpy(message.lhs.values), _BY_DESTINATION[message.lhs.target])
    b = a  # not read
    if message.rhs is not None:
        b = Table(as_numpy(message.rhs.values), _BY_DESTINATION[message.rhs.target])
    return formula, a, b


# -- attention


def attend(block: EdgeBlock, how: Attention, operands: AttentionOperands, state: OnlineSoftmaxState) -> None:
    """Compiled kernel of `sar.kernels.attention.attend`."""
    csr, shape = view(block, with_edges=operands.reads_edges(how)), operands.x.shape[1:]
    x, sums = as_numpy(operands.x), Sums(*map(as_numpy, state))
    x_score, attn, weight = _arrays(sums.total, operands.x_score, operands.attn, operands.weight)
    scored = Scored(as_numpy(operands.y), x if operands.x_score is None else x_score, attn)
    given, private = (csr, _heads(how, shape), x, scored, weight, sums), partial(_scratch, sums.total, shape[0])
    run_balanced(attention_loops.attend, csr.indptr, shape.numel(), *given, private=private)


def head_sums(how: Attention, grad: Tensor, out: Tensor, stats: Tensor) -> None:
    """Write the sums of grad * out over each head to stats[:, GRAD_DOT]."""
    shape = grad.shape[1:]
    given = _heads(how, shape), as_numpy(grad), as_numpy(out), as_numpy(stats)
    run_balanced(attention_loops.head_sums, len(grad), shape.numel(), *given)


def project(x: Tensor, attn: Tensor) -> Tensor:
    """Compiled kernel of `sar.kernels.attention.project`."""
    _, heads, dim = x.shape
    out = attn.new_empty(len(x), heads)
    given = np.uint64(heads), np.uint64(dim), as_numpy(x), as_numpy(attn), as_numpy(out)
    run_balanced(attention_loops.project, len(x), heads * dim, *given)
    return out


def project_grad(x: Tensor, attn: Tensor, grad: Tensor, x_grad: Tensor, attn_grad: Tensor) -> None:
    """Compiled kernel of `sar.kernels.attention.project_grad`."""
    _, heads, dim = x.shape
    given = np.uint64(heads), np.uint64(dim), as_numpy(x), as_numpy(attn), as_numpy(grad), as_numpy(x_grad)
    run_balanced(attention_loops.project_grad, len(x), heads * dim, *given, total=as_numpy(attn_grad))


def attend_grad(
    block: EdgeBlock, how: Attention, operands: AttentionOperands, grad: Tensor, stats: Tensor, grads: Gradients
) -> None:
    """Compiled kernel of `sar.kernels.attention.attend_grad`; see `Backend`."""
    additive, reads_edges, shape = how.score is Score.ADDITIVE, operands.reads_edges(how), operands.x.shape[1:]
    heads, incoming = _heads(how, shape), Incoming(as_numpy(grad), as_numpy(stats))
    x = as_numpy(operands.x)
    x_score, attn, weight = _arrays(incoming.stats, operands.x_score, operands.attn, operands.weight)
    x_score, y = (x_score, incoming.stats) if additive else (x, as_numpy(operands.y))
    y_grad = as_numpy(grads.y)
    results = SourceGradients(*_arrays(y_grad, grads.x, grads.x_score, grads.weight))
    private = partial(_scratch, y_grad, shape[0])

    csr = view(block, by_source=True, with_edges=reads_edges)
    given = csr, heads, x, Scored(x_score, y, attn), weight, incoming, results
    total = y_grad if additive else y_grad[:0]
    run_balanced(attention_loops.source_gradients, csr.indptr, shape.numel(), *given, total=total, private=private)
    if additive:
        return
    csr, total = view(block, with_edges=reads_edges), y_grad[:0] if grads.attn is None else as_numpy(grads.attn)
    own = csr, heads, x, Scored(y, x, attn), weight, incoming, y_grad
    run_balanced(attention_loops.destination_gradients, csr.indptr, shape.numel(), *own, total=total, private=private)


def _arrays(like: NDArray[Any], *tensors: Tensor | None) -> list[NDArray[Any]]:
    """Tensors as arrays; of None an empty one of the dtype of `like`, because kernels are compiled by dtype."""
    return [like[:0] if tensor is None else as_numpy(tensor) for tensor in tensors]


def _scratch(like: NDArray[Any], heads: int) -> list[Scratch]:
    """Working memory of one thread, with numbers of the dtype of `like`."""
    return [Scratch(*np.empty((5, CHUNK * heads), like.dtype), *np.empty((4, CHUNK + 1), np.uint64))]


@lru_cache(maxsize=64)
def _heads(how: Attention, shape: tuple[int, int]) -> Heads:
    heads, dim = map(np.uint64, shape)
    seed, drop = np.uint64(how.seed), np.uint64(how.drop_below)
    return Heads(int(how.score), heads, dim, float(how.factor), seed, drop, how.kept_scale)
