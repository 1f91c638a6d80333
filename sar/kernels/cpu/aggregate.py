"""The kernels compiled with Numba, for float32 and float64 tensors in CPU memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sar.kernels.cpu import loops
from sar.kernels.cpu.loops import EDGE, OTHER, OWN, Layout, Walk
from sar.kernels.cpu.operand_layout import make_layout
from sar.kernels.cpu.threads import run_balanced
from sar.kernels.edge_block import EdgeBlock, Transposed, index_dtype
from sar.kernels.ops import Op, Operand, Target, aligned_message_shape, aligned_shapes

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

_NO_INDICES = np.empty(0, np.int32)


def aggregate_sum(block: EdgeBlock, op: Op, lhs: Operand, rhs: Operand | None, out: Tensor) -> None:
    """Numba kernel of `sar.kernels.aggregate_sum`."""
    walk = by_destination(block, with_edges=_of_edges(lhs, rhs))
    _run(loops.accumulate, walk, *_message(op, lhs, rhs), flat(out), OWN)


def aggregate_cmp(
    block: EdgeBlock, op: Op, lhs: Operand, rhs: Operand | None, out: Tensor, arg: Tensor, largest: bool
) -> None:
    """Numba kernel of `sar.kernels.aggregate_cmp`."""
    _run(loops.compare, by_destination(block), *_message(op, lhs, rhs), flat(out), flat(arg), largest)


def edge_apply(block: EdgeBlock, op: Op, lhs: Operand, rhs: Operand | None, out: Tensor) -> None:
    """Numba kernel of `sar.kernels.edge_apply`."""
    _run(loops.assign, by_destination(block), *_message(op, lhs, rhs), flat(out))


def aggregate_grad(
    block: EdgeBlock,
    op: Op,
    wrt: str,
    lhs: Operand,
    rhs: Operand | None,
    grad: Operand,
    arg: Tensor | None,
    out: Tensor,
) -> None:
    """Numba kernel of `sar.kernels.aggregate_grad`.

    A derivative is again an operation on two operands, the gradient of the messages and the other operand of the
    forward, whose result is summed where the operand in question was broadcast.
    """
    lhs_aligned, rhs_aligned, full = aligned_shapes(op, lhs.shape, None if rhs is None else rhs.shape)
    grad_aligned = aligned_message_shape(op, full)
    code, sign = _OPERATIONS[op]
    if wrt == "lhs":
        operand, aligned, other, other_aligned = lhs, lhs_aligned, rhs, rhs_aligned
    else:
        assert rhs is not None
        operand, aligned, other, other_aligned = rhs, rhs_aligned, lhs, lhs_aligned
        code = loops.DIV_RHS if op is Op.DIV else code
    if op in (Op.COPY, Op.ADD, Op.SUB):
        code, sign = loops.COPY, sign if wrt == "rhs" else 1
        other, other_aligned = grad, grad_aligned  # not read
    assert other is not None
    layout = make_layout(full, grad_aligned, other_aligned, aligned)
    # Grouped by destination, several threads would write to one source's row.
    of_sources = operand.target is Target.U
    group, whose = (by_source, _BY_SOURCE) if of_sources else (by_destination, _BY_DESTINATION)
    walk = group(block, with_edges=arg is not None or _of_edges(lhs, rhs, grad))
    factors = flat(grad.values), whose[grad.target], flat(other.values), whose[other.target]
    to = flat(out), whose[operand.target]
    if arg is None and code != loops.DIV_RHS:
        _run(loops.accumulate, walk, code, sign, layout, *factors, *to)
    else:
        denominator = flat(operand.values) if code == loops.DIV_RHS else to[0]  # else not read
        winners = _NO_INDICES if arg is None else flat(arg)
        _run(loops.accumulate_where, walk, code, sign, layout, *factors, denominator, winners, *to)


def add_rows(rows: Tensor, values: Tensor, out: Tensor) -> None:
    """Numba kernel of `sar.kernels.add_rows`."""
    loops.add_rows(flat(rows), flat(values), flat(out), np.uint64(values[0].numel()))


def transpose(block: EdgeBlock) -> Transposed:
    """The block's edges grouped by source, by counting sort."""
    dtype = index_dtype(block.num_edges)
    result = Transposed(
        torch.zeros(block.num_src + 1, dtype=dtype),
        torch.empty(block.num_edges, dtype=torch.int32),
        torch.empty(block.num_edges, dtype=dtype),
    )
    loops.transpose(*(flat(tensor) for tensor in (block.rows, block.indptr, block.cols, *result)))
    return result


def _run(kernel: Any, walk: Walk, code: int, sign: int, layout: Layout, *arguments: object) -> None:
    width = int(layout.length) * len(layout.a_offsets)
    run_balanced(kernel, walk.indptr, width, walk, code, sign, layout, *arguments)


def _message(op: Op, lhs: Operand, rhs: Operand | None) -> tuple[Any, ...]:
    """Operation, sign, layout, and both operands with whose rows they have, for a walk by destination."""
    lhs_aligned, rhs_aligned, full = aligned_shapes(op, lhs.shape, None if rhs is None else rhs.shape)
    if rhs is None:
        rhs, rhs_aligned = lhs, lhs_aligned  # not read
    layout = make_layout(full, lhs_aligned, rhs_aligned, aligned_message_shape(op, full))
    a, b = ((flat(operand.values), _BY_DESTINATION[operand.target]) for operand in (lhs, rhs))
    return *_OPERATIONS[op], layout, *a, *b


def by_destination(block: EdgeBlock, *, with_edges: bool = True) -> Walk:
    """The edges grouped by destination; `with_edges` says whether their IDs are needed."""
    rows, indptr, cols = flat(block.rows), flat(block.indptr), flat(block.cols)
    return Walk(rows, indptr, cols, _NO_INDICES, *_edge_ids(block, with_edges))


def by_source(block: EdgeBlock, *, with_edges: bool = True) -> Walk:
    """The edges grouped by source; `with_edges` says whether their IDs are needed."""
    indptr, dst, positions = block.transposed(with_positions=with_edges)
    places = _NO_INDICES if positions is None else flat(positions)
    return Walk(_NO_INDICES, flat(indptr), flat(dst), places, *_edge_ids(block, with_edges))


def _edge_ids(block: EdgeBlock, needed: bool) -> tuple[NDArray[Any], np.uint64]:
    ids = block.edge_ids if needed else None
    return _NO_INDICES if ids is None else flat(ids), np.uint64(block.edge_offset)


def _of_edges(*operands: Operand | None) -> bool:
    """Whether one of the operands has rows of edges."""
    return any(operand is not None and operand.target is Target.E for operand in operands)


def flat(tensor: Tensor | None) -> NDArray[Any]:
    """The elements of a tensor, row after row; shares its memory where that is contiguous."""
    assert tensor is not None
    return tensor.detach().contiguous().view(-1).numpy()
