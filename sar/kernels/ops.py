"""The message operators: their names, the shape of what they make, and what their derivatives read."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from sar.errors import GraphError

Shape = tuple[int, ...]


class Target(IntEnum):
    """Whose rows an operand has."""

    U = 0
    V = 1
    E = 2


class Op(Enum):
    """How a message is made of its operands; called with a name, gives the operator."""

    COPY = "copy_lhs"
    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    DIV = "div"
    DOT = "dot"


OPS = tuple(op.value for op in Op)


class Operand(NamedTuple):
    """A tensor that has a row per source, destination or edge."""

    values: Tensor | None  # (rows of the target, *shape); None where only the shape matters
    target: Target
    shape: Shape  # trailing

    @classmethod
    def of(cls, values: Tensor, target: Target) -> Operand:
        """The operand with the trailing shape of its values."""
        return cls(values, target, tuple(values.shape[1:]))


def aligned_shapes(op: Op, lhs_shape: Shape, rhs_shape: Shape | None) -> tuple[Shape, Shape, Shape]:
    """The trailing shapes of both operands and of their product space, padded with leading ones to equal length.

    The product space of `dot` still has the last dimension, which the message then sums.
    """
    if op is Op.COPY:
        return lhs_shape, (), lhs_shape
    assert rhs_shape is not None
    length = max(len(lhs_shape), len(rhs_shape), op is Op.DOT)
    lhs = (1,) * (length - len(lhs_shape)) + lhs_shape
    rhs = (1,) * (length - len(rhs_shape)) + rhs_shape
    if op is Op.DOT and lhs[-1] != rhs[-1]:
        raise GraphError(
            f"The operands of dot have trailing shapes {lhs_shape} and {rhs_shape}; "
            "their last dimensions must be equal. Reshape one of them."
        )
    if any(a != b and a != 1 and b != 1 for a, b in zip(lhs, rhs, strict=True)):
        raise GraphError(
            f"The operands of {op.value} have trailing shapes {lhs_shape} and {rhs_shape}, which do not broadcast: "
            "aligned at the right, sizes must be equal or 1. Reshape one of them."
        )
    return lhs, rhs, tuple(b if a == 1 else a for a, b in zip(lhs, rhs, strict=True))


def aligned_message_shape(op: Op, full: Shape) -> Shape:
    """The shape of a message in the dimensions of its operands' product space."""
    return (*full[:-1], 1) if op is Op.DOT else full


def message_shape(op: Op | str, lhs_shape: Shape, rhs_shape: Shape | None = None) -> Shape:
    """The trailing shape of a message, operands broadcast as in NumPy; `dot` reduces the last dimension to 1.

    Raises:
        GraphError: the operands do not broadcast.
    """
    op = Op(op)
    full = aligned_shapes(op, tuple(lhs_shape), None if rhs_shape is None else tuple(rhs_shape))[2]
    return aligned_message_shape(op, full) if lhs_shape or rhs_shape else ()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are summed: half precisions in float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def operand_values_needed(op: Op | str, wrt: str) -> tuple[bool, bool]:
    """Whether the derivative with respect to operand `wrt` ("lhs" or "rhs") reads the values of lhs and of rhs."""
    op = Op(op)
    if op is Op.DIV:
        return wrt == "rhs", True
    if op in (Op.MUL, Op.DOT):
        return wrt == "rhs", wrt == "lhs"
    return False, False
