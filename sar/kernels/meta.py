"""The kernels for tensors without values (torch's device "meta"): they compute nothing, and keep what the others keep.

`sar plan` runs a model on such tensors to see how much memory it takes and what it sends.
"""

from __future__ import annotations

from torch import Tensor

from sar.kernels.attention_operands import Attention, Ends, Gradients, Running
from sar.kernels.edge_block import EdgeBlock
from sar.kernels.ops import Op, Operand, Target


def aggregate_sum(block: EdgeBlock, op: Op, lhs: Operand, rhs: Operand | None, out: Tensor) -> None:
    """As `sar.kernels.aggregate_sum`."""


def aggregate_cmp(
    block: EdgeBlock, op: Op, lhs: Operand, rhs: Operand | None, out: Tensor, arg: Tensor, largest: bool
) -> None:
    """As `sar.kernels.aggregate_cmp`."""


def edge_apply(block: EdgeBlock, op: Op, lhs: Operand, rhs: Operand | None, out: Tensor) -> None:
    """As `sar.kernels.edge_apply`."""


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
    """As `sar.kernels.aggregate_grad`: gradients of sources need the edges grouped by source."""
    operands = [operand for operand in (lhs, rhs, grad) if operand is not None]
    if (rhs if wrt == "rhs" and rhs is not None else lhs).target is Target.U:
        block.transposed(with_positions=arg is not None or any(operand.target is Target.E for operand in operands))


def add_rows(rows: Tensor, values: Tensor, out: Tensor) -> None:
    """As `sar.kernels.add_rows`."""


def project(x: Tensor, attn: Tensor) -> Tensor:
    """As `sar.kernels.attention.project`."""
    return x.new_empty(x.shape[:2])


def project_grad(x: Tensor, attn: Tensor, grad: Tensor, x_grad: Tensor, attn_grad: Tensor) -> None:
    """As `sar.kernels.attention.project_grad`."""


def head_sums(how: Attention, grad: Tensor, out: Tensor, stats: Tensor) -> None:
    """As that of the compiled kernels."""


def attend(block: EdgeBlock, how: Attention, ends: Ends, from_score: Tensor | None, running: Running) -> None:
    """As `sar.kernels.attention.attend`."""


def attend_grad(
    block: EdgeBlock,
    how: Attention,
    ends: Ends,
    from_score: Tensor | None,
    grad: Tensor,
    stats: Tensor,
    grads: Gradients,
    from_score_grad: Tensor | None,
) -> None:
    """As `sar.kernels.attention.attend_grad`: gradients of sources need the edges grouped by source."""
    block.transposed(with_positions=how.dropout > 0 or ends.weight is not None)
