"""The kernels for tensors without values (torch's device "meta"): they compute nothing, and keep what the others keep.

`sar plan` runs a model on such tensors to see how much memory it takes and what it sends. They use
what the others read, so that this is seen ([Note: leaving memory]).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sar.kernels.attention_operands import Attention, AttentionOperands, Gradients, OnlineSoftmaxState, Score
from sar.kernels.edge_block import EdgeBlock, Transposed, index_dtype
from sar.kernels.ops import EdgeMessage, EdgeOperand, Target


def aggregate_sum(block: EdgeBlock, message: EdgeMessage, out: Tensor) -> None:
    """As `sar.kernels.aggregate_sum`."""
    _read_by_destination(block)
    _read(out, *message.tensors)


edge_apply = aggregate_sum


def aggregate_cmp(block: EdgeBlock, message: EdgeMessage, out: Tensor, arg: Tensor, largest: bool) -> None:
    """As `sar.kernels.aggregate_cmp`."""
    _read_by_destination(block)
    _read(out, arg, *message.tensors)


def aggregate_grad(
    block: EdgeBlock, message: EdgeMessage, wrt: str, grad: EdgeOperand, out: Tensor, arg: Tensor | None
) -> None:
    """As `sar.kernels.aggregate_grad`: gradients of sources need the edges grouped by source."""
    if message.operand(wrt).target is Target.U:
        of_edges = any(operand.target is Target.E for operand in (*message.operands, grad))
        _read(*block.transposed(_transpose, with_positions=arg is not None or of_edges))
    else:
        _read_by_destination(block)
    _read(out, arg, grad.values, *message.tensors)


def add_rows(rows: Tensor, values: Tensor, out: Tensor) -> None:
    """As `sar.kernels.add_rows`."""
    _read(rows, values, out)


def project(x: Tensor, attn: Tensor) -> Tensor:
    """As `sar.kernels.attention.project`."""
    _read(x, attn)
    return x.new_empty(x.shape[:2])


def project_grad(x: Tensor, attn: Tensor, grad: Tensor, x_grad: Tensor, attn_grad: Tensor) -> None:
    """As `sar.kernels.attention.project_grad`."""
    _read(x, attn, grad, x_grad, attn_grad)


def head_sums(how: Attention, grad: Tensor, out: Tensor, stats: Tensor) -> None:
    """As that of the compiled kernels."""
    _read(grad, out, stats)


def attend(block: EdgeBlock, how: Attention, operands: AttentionOperands, state: OnlineSoftmaxState) -> None:
    """As `sar.kernels.attention.attend`."""
    _read_by_destination(block)
    _read(*operands, *state)


def attend_grad(
    block: EdgeBlock, how: Attention, operands: AttentionOperands, grad: Tensor, stats: Tensor, grads: Gradients
) -> None:
    """As `sar.kernels.attention.attend_grad`: gradients of sources need the edges grouped by source."""
    _read(*block.transposed(_transpose, with_positions=how.dropout > 0 or operands.weight is not None))
    if how.score is not Score.ADDITIVE:
        _read_by_destination(block)
    _read(grad, stats, *operands, *grads)


def _read(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.detach()


def _read_by_destination(block: EdgeBlock) -> None:
    _read(block.rows, block.indptr, block.cols)


def _transpose(block: EdgeBlock) -> Transposed:
    _read_by_destination(block)
    dtype = index_dtype(block.num_edges)
    return Transposed(
        torch.empty(block.num_src + 1, dtype=dtype, device="meta"),
        torch.empty(block.num_edges, dtype=torch.int32, device="meta"),
        torch.empty(block.num_edges, dtype=dtype, device="meta"),
    )
