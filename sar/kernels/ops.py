"""The message operators: names, shapes of messages, and the operands that their derivatives read."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import Any, NamedTuple

from torch import Tensor

from sar.errors import GraphError

Shape = tuple[int, ...]


class Target(IntEnum):
    """Whose rows an operand has."""

    U = 0
    V = 1
    E = 2


class Op(str, Enum):
    """How a message is made of its operands."""

    COPY = "copy_lhs"
    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    DIV = "div"
    DOT = "dot"


class EdgeOperand(NamedTuple):
    """A tensor that has a row per source, destination or edge."""

    values: Tensor | None  # (rows of the target, *shape); None if only the shape matters
    target: Target  # whose rows it has
    shape: Shape  # trailing

    @classmethod
    def of(cls, values: Tensor, target: Target) -> EdgeOperand:
        """The operand with the trailing shape of its values."""
        return cls(values, target, tuple(values.shape[1:]))


class EdgeMessage:
    """op(lhs, rhs) of every edge, trailing shapes broadcast as in NumPy; rhs is None for a copy.

    Attributes:
        operands: lhs and rhs, or lhs alone.
        tensors: the values of the operands.
        shape: trailing shape of the messages; `dot` reduces the last dimension to 1.
        reads_edges: whether an operand has rows of edges.
        kept: a backend's cache for this operation and these shapes; shared by all `with_values`.

    Raises:
        GraphError: for operands that do not broadcast.
    """

    __slots__ = ("_aligned", "kept", "lhs", "op", "operands", "reads_edges", "rhs", "shape", "tensors")

    def __init__(self, op: Op, lhs: EdgeOperand, rhs: EdgeOperand | None = None) -> None:
        self.op = op
        self.lhs = lhs
        self.rhs = rhs
        self.operands: tuple[EdgeOperand, ...] = (lhs,) if rhs is None else (lhs, rhs)
        self.tensors: Sequence[Tensor | None] = [operand.values for operand in self.operands]
        self.reads_edges = any(operand.target is Target.E for operand in self.operands)
        self.kept: dict[str, Any] = {}
        self._aligned: tuple[Shape, Shape, Shape] = lhs.shape, (), lhs.shape
        if rhs is not None:
            length = max(len(lhs.shape), len(rhs.shape), op is Op.DOT)
            left, right = ((1,) * (length - len(side.shape)) + side.shape for side in (lhs, rhs))
            if op is Op.DOT and left[-1] != right[-1]:
                raise GraphError(
                    f"The operands of dot have trailing shapes {lhs.shape} and {rhs.shape}; "
                    "their last dimensions must be equal. Reshape one of them."
                )
            if any(a != b and a != 1 and b != 1 for a, b in zip(left, right, strict=True)):
                raise GraphError(
                    f"The operands of {op.value} have trailing shapes {lhs.shape} and {rhs.shape}, which do not "
                    "broadcast: aligned at the right, sizes must be equal or 1. Reshape one of them."
                )
            self._aligned = left, right, tuple(b if a == 1 else a for a, b in zip(left, right, strict=True))
        scalars = not any(operand.shape for operand in self.operands)
        self.shape: Shape = () if scalars else aligned_message_shape(op, self._aligned[2])

    def with_values(self, values: Sequence[Tensor | None]) -> EdgeMessage:
        """The same message of operands with these values, whose shapes are not checked again."""
        made = object.__new__(EdgeMessage)
        made.op, made._aligned, made.shape = self.op, self._aligned, self.shape
        made.tensors, made.reads_edges, made.kept = values, self.reads_edges, self.kept
        made.lhs = EdgeOperand(values[0], self.lhs.target, self.lhs.shape)
        if self.rhs is None:
            made.rhs, made.operands = None, (made.lhs,)
        else:
            made.rhs = EdgeOperand(values[1], self.rhs.target, self.rhs.shape)
            made.operands = (made.lhs, made.rhs)
        return made

    def aligned_shapes(self) -> tuple[Shape, Shape, Shape]:
        """The trailing shapes of lhs, rhs and their product space, padded with leading ones to equal length.

        The product space of `dot` still has the last dimension, which the message then sums.
        """
        return self._aligned

    def operand(self, wrt: str) -> EdgeOperand:
        """The operand "lhs" or "rhs"."""
        found = self.rhs if wrt == "rhs" else self.lhs
        assert found is not None
        return found


def aligned_message_shape(op: Op, full: Shape) -> Shape:
    """The shape of a message in the dimensions of its operands' product space."""
    return (*full[:-1], 1) if op is Op.DOT else full


def operand_values_needed(op: Op, wrt: str) -> tuple[bool, bool]:
    """Whether the derivative with respect to operand `wrt` ("lhs" or "rhs") reads the values of lhs and of rhs."""
    if op is Op.DIV:
        return wrt == "rhs", True
    if op in (Op.MUL, Op.DOT):
        return wrt == "rhs", wrt == "lhs"
    return False, False
