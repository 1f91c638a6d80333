"""The kernels compiled with Numba, for float32 and float64 tensors in CPU memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sar.kernels import compiled
from sar.kernels.compiled import EDGE, OTHER, OWN, Walk
from sar.kernels.edge_block import EdgeBlock, Transposed, index_dtype
from sar.kernels.layout import make_layout
from sar.kernels.ops import Op, Shape, Target, aligned_shapes
from sar.kernels.threads import run_balanced

BY_DESTINATION = {Target.U: OTHER, Target.V: OWN, Target.E: EDGE}
BY_SOURCE = {Target.U: OWN, Target.V: OTHER, Target.E: EDGE}

_NO_INDICES = np.empty(0, np.int32)


def aggregate_sum(
    block: EdgeBlock, op: Op, lhs: Tensor, lhs_target: Target, rhs: Tensor | None, rhs_target: Target, out: Tensor
) -> None:
    """Numba kernel of `sar.kernels.aggregate_sum`."""
    arguments = _message_arguments(op, lhs, lhs_target, rhs, rhs_target)
    _run(compiled.accumulate, _by_destination(block), *arguments, _flat(out), OWN)


def aggregate_cmp(
    block: EdgeBlock,
    op: Op,
    lhs: Tensor,
    lhs_target: Target,
    rhs: Tensor | None,
    rhs_target: Target,
    out: Tensor,
    arg: Tensor,
    largest: bool,
) -> None:
    """Numba kernel of `sar.kernels.aggregate_cmp`."""
    arguments = _message_arguments(op, lhs, lhs_target, rhs, rhs_target)
    _run(compiled.compare, _by_destination(block), *arguments, _flat(out), _flat(arg), largest)


def edge_apply(
    block: EdgeBlock, op: Op, lhs: Tensor, lhs_target: Target, rhs: Tensor | None, rhs_target: Target, out: Tensor
) -> None:
    """Numba kernel of `sar.kernels.edge_apply`."""
    _run(compiled.assign, _by_destination(block), *_message_arguments(op, lhs, lhs_target, rhs, rhs_target), _flat(out))


def aggregate_grad(
    block: EdgeBlock,
    op: Op,
    wrt: str,
    lhs: Tensor | None,
    lhs_target: Target,
    lhs_shape: Shape,
    rhs: Tensor | None,
    rhs_target: Target,
    rhs_shape: Shape | None,
    grad: Tensor,
    grad_target: Target,
    arg: Tensor | None,
    out: Tensor,
) -> None:
    """Numba kernel of `sar.kernels.aggregate_grad`.

    The gradient is again an operation on two operands, the messages' gradient and at most one of the forward's, whose
    result is summed where the operand was broadcast.
    """
    lhs_aligned, rhs_aligned, full = aligned_shapes(op, lhs_shape, rhs_shape)
    grad_aligned = full[:-1] + (1,) if op is Op.DOT else full
    if wrt == "lhs":
        target, aligned, other, other_target, other_aligned = lhs_target, lhs_aligned, rhs, rhs_target, rhs_aligned
    else:
        target, aligned, other, other_target, other_aligned = rhs_target, rhs_aligned, lhs, lhs_target, lhs_aligned
    if op in (Op.MUL, Op.DOT):
        code = compiled.MUL
    elif op is Op.DIV:
        code = compiled.DIV if wrt == "lhs" else compiled.DIV_RHS
    else:
        code = compiled.NEGATE if op is Op.SUB and wrt == "rhs" else compiled.COPY
        other, other_target, other_aligned = grad, target, grad_aligned  # not read
    assert other is not None
    layout = make_layout(full, grad_aligned, other_aligned, aligned)
    # Sources are the rows of no thread's own in block order; grouped by source they are.
    walk, whose = (_by_source(block), BY_SOURCE) if target is Target.U else (_by_destination(block), BY_DESTINATION)
    a, b = (_flat(grad), whose[grad_target]), (_flat(other), whose[other_target])
    if arg is None and code != compiled.DIV_RHS:
        _run(compiled.accumulate, walk, code, layout, *a, *b, _flat(out), whose[target])
    else:
        c = _flat(out if rhs is None or code != compiled.DIV_RHS else rhs)
        _run(
            compiled.accumulate_where,
            walk,
            code,
            layout,
            *a,
            *b,
            c,
            _NO_INDICES if arg is None else _flat(arg),
            _flat(out),
            whose[target],
        )


def transpose(block: EdgeBlock) -> Transposed:
    """The block's edges grouped by source."""
    dtype = index_dtype(block.num_edges)
    result = Transposed(
        torch.zeros(block.num_src + 1, dtype=dtype),
        torch.empty(block.num_edges, dtype=torch.int32),
        torch.empty(block.num_edges, dtype=dtype),
    )
    compiled.transpose(*(_flat(tensor) for tensor in (block.rows, block.indptr, block.cols, *result)))
    return result


def _run(kernel: Any, walk: Walk, code: int, layout: compiled.Layout, *arguments: object) -> None:
    width = int(layout.length) * len(layout.a_offsets)
    run_balanced(kernel, walk.indptr, width, walk, code, layout, *arguments)


def _message_arguments(
    op: Op, lhs: Tensor, lhs_target: Target, rhs: Tensor | None, rhs_target: Target
) -> tuple[Any, ...]:
    """Operation, layout, and both operands with whose rows they have, for a walk by destination."""
    rhs_shape = None if rhs is None else tuple(rhs.shape[1:])
    lhs_aligned, rhs_aligned, full = aligned_shapes(op, tuple(lhs.shape[1:]), rhs_shape)
    out_aligned = full[:-1] + (1,) if op is Op.DOT else full
    if rhs is None:
        rhs, rhs_target, rhs_aligned = lhs, Target.V, lhs_aligned  # not read
    code = compiled.MUL if op is Op.DOT else int(op)
    layout = make_layout(full, lhs_aligned, rhs_aligned, out_aligned)
    return code, layout, _flat(lhs), BY_DESTINATION[lhs_target], _flat(rhs), BY_DESTINATION[rhs_target]


def _by_destination(block: EdgeBlock) -> Walk:
    return Walk(
        _flat(block.rows), _flat(block.indptr), _flat(block.cols), _NO_INDICES, _edge_ids(block), _offset(block)
    )


def _by_source(block: EdgeBlock) -> Walk:
    indptr, dst, positions = (_flat(part) for part in block.transposed())
    return Walk(_NO_INDICES, indptr, dst, positions, _edge_ids(block), _offset(block))


def _edge_ids(block: EdgeBlock) -> NDArray[Any]:
    return _NO_INDICES if block.edge_ids is None else _flat(block.edge_ids)


def _offset(block: EdgeBlock) -> np.uint64:
    return np.uint64(block.edge_offset)


def _flat(tensor: Tensor) -> NDArray[Any]:
    return tensor.detach().contiguous().view(-1).numpy()
