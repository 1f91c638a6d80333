"""The kernels for tensors without values (torch's device "meta"). They compute nothing.

`sar plan` runs a model on such tensors to predict its memory and messages. These kernels keep the tensors that the
others keep, and touch those that the others read, so that both are counted ([Note: leaving memory]).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sar.kernels.edge_block import EdgeBlock, Transposed, index_dtype
from sar.kernels.ops import (
    Attention,
    AttentionOperands,
    EdgeMessage,
    EdgeOperand,
    Gradients,
    OnlineSoftmaxState,
    Score,
    Target,
)


def _read(*given: Any) -> None:
    """Detach, which makes a kernel's reads of tensors visible out of core."""
    for each in given:
        if isinstance(each, EdgeBlock):
            _read(each.rows, each.indptr, each.cols)
        elif isinstance(each, Tensor):
            each.detach()


add_rows = project_grad = head_sums = _read


def aggregate_sum(block: EdgeBlock, message: EdgeMessage, *others: Any) -> None:
    """As `sar.kernels.aggregate_sum`, and other kernels that go through the edges by destination."""
    _read(block, *others, *message.tensors)


aggregate_cmp = edge_apply = aggregate_sum


def aggregate_grad(
    block: EdgeBlock, message: EdgeMessage, wrt: str, grad: EdgeOperand, out: Tensor, arg: Tensor | None,
    fresh: bool = False,
) -> None:  # fmt: skip
    """As `sar.kernels.aggregate_grad`: gradients of sources need the edges grouped by source."""
    if message.operands[wrt == "rhs"].target is Target.U:
        of_edges = any(operand.target is Target.E for operand in (*message.operands, grad))
        _read(*block.transposed(_transpose, with_positions=arg is not None or of_edges))
    else:
        _read(block)
    _read(out, arg, grad.values, *message.tensors)


def project(x: Tensor, attn: Tensor) -> Tensor:
    """As `sar.kernels.attention.project`."""
    _read(x, attn)
    return attn.new_empty(x.shape[:2])


def attend(block: EdgeBlock, how: Attention, operands: AttentionOperands, state: OnlineSoftmaxState) -> None:
    """As `sar.kernels.attention.attend`."""
    _read(block, *operands, *state)


def attend_grad(
    block: EdgeBlock, how: Attention, operands: AttentionOperands, grad: Tensor, stats: Tensor, grads: Gradients
) -> None:
    """As `sar.kernels.attention.attend_grad`: gradients of sources need the edges grouped by source."""
    _read(*block.transposed(_transpose, with_positions=operands.reads_edges(how)))
    if how.score is not Score.ADDITIVE:
        _read(block)
    _read(grad, stats, *operands, *grads)


def _transpose(block: EdgeBlock) -> Transposed:
    _read(block)
    indptr = torch.empty(block.num_src + 1, dtype=index_dtype(block.num_edges), device="meta")
    dst = torch.empty(block.num_edges, dtype=torch.int32, device="meta")
    return Transposed(indptr, dst, torch.empty_like(dst, dtype=indptr.dtype))
