"""The arguments of kernels: messages of an operator and its operands, and attention with its operands and sums."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sar.errors import GraphError
from sar.tensors.views import accumulation_dtype

Shape = tuple[int, ...]


class Target(IntEnum):
    """Whose rows an operand has."""

    U = 0
    V = 1
    E = 2


class Op(str, Enum):
    """The operation that combines the operands of a message."""

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
        operands: lhs and rhs, or only lhs.
        tensors: the values of the operands.
        shape: trailing shape of the messages; `dot` reduces the last dimension to 1.
        aligned: trailing shapes of lhs, rhs, their product space and the message, padded with leading ones to equal
            length. The product space of `dot` still has the last dimension, which the message then sums.
        reads_edges: whether an operand has rows of edges.
        kept: a backend's cache for this operation and these shapes; shared by all `with_values`.

    Raises:
        GraphError: for operands that do not broadcast.
    """

    __slots__ = ("aligned", "kept", "lhs", "op", "operands", "reads_edges", "rhs", "shape", "tensors")

    def __init__(self, op: Op, lhs: EdgeOperand, rhs: EdgeOperand | None = None) -> None:
        self.op = op
        self.lhs = lhs
        self.rhs = rhs
        self.operands: tuple[EdgeOperand, ...] = (lhs,) if rhs is None else (lhs, rhs)
        self.tensors: Sequence[Tensor | None] = [operand.values for operand in self.operands]
        self.reads_edges = any(operand.target is Target.E for operand in self.operands)
        self.kept: dict[str, Any] = {}
        self.aligned: tuple[Shape, Shape, Shape, Shape] = lhs.shape, (), lhs.shape, lhs.shape
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
            full = tuple(b if a == 1 else a for a, b in zip(left, right, strict=True))
            self.aligned = left, right, full, (*full[:-1], 1) if op is Op.DOT else full
        scalars = not any(operand.shape for operand in self.operands)
        self.shape: Shape = () if scalars else self.aligned[3]

    def with_values(self, values: Sequence[Tensor | None]) -> EdgeMessage:
        """The same message of operands with these values, whose shapes are not checked again."""
        made = object.__new__(EdgeMessage)
        made.op, made.aligned, made.shape = self.op, self.aligned, self.shape
        made.tensors, made.reads_edges, made.kept = values, self.reads_edges, self.kept
        made.lhs = EdgeOperand(values[0], self.lhs.target, self.lhs.shape)
        if self.rhs is None:
            made.rhs, made.operands = None, (made.lhs,)
        else:
            made.rhs = EdgeOperand(values[1], self.rhs.target, self.rhs.shape)
            made.operands = (made.lhs, made.rhs)
        return made


def operand_values_needed(op: Op, wrt: str) -> tuple[bool, bool]:
    """Whether the derivative with respect to operand `wrt` ("lhs" or "rhs") reads the values of lhs and of rhs."""
    if op is Op.DIV:
        return wrt == "rhs", True
    if op in (Op.MUL, Op.DOT):
        return wrt == "rhs", wrt == "lhs"
    return False, False


# -- attention

PEAK, INVERSE, GRAD_DOT, SCORE = 0, 1, 2, 3
"""Rows of a destination's statistics: see `sar.kernels.attention.destination_statistics`."""
STATISTICS = 4  # rows


class Score(IntEnum):
    """The logit of an edge from its source features x, (D,) per head, and its destination's y."""

    ADDITIVE = 0  # leaky_relu(attn . x + y), with a number y a head: Velickovic 2018, "Graph attention networks"
    DYNAMIC = 1  # attn . leaky_relu(x + y): Brody 2022, "How attentive are graph attention networks?"
    DOT = 2  # factor * x . y


class Attention(NamedTuple):
    """The settings of a call."""

    score: Score
    factor: float  # slope of the leaky ReLU below 0, at least 0; for DOT the factor of the products
    dropout: float = 0.0  # probability with which a weight becomes 0; the others grow by 1 / (1 - dropout)
    seed: int = 0  # of dropout; a weight's fate depends on it, the edge ID and the head only

    @property
    def drop_below(self) -> int:
        """Weights whose hash of 32 bits is below this are dropped; 0: none."""
        return round(self.dropout * 2**32)

    @property
    def kept_scale(self) -> float:
        """The factor of weights that are not dropped."""
        return 1 / (1 - self.dropout) if self.dropout < 1 else 0.0


class AttentionOperands(NamedTuple):
    """Operands of a block's edges, of one dtype: float32 or float64. Features of float32 may have a half precision."""

    x: Tensor  # (num_src, H, D) features of the sources
    y: Tensor  # of the destinations: (num_dst, H) for ADDITIVE scores, else features (num_dst, H, D)
    attn: Tensor | None  # (H, D); None for DOT
    weight: Tensor | None  # (edges,) factor of the softmax of each edge; None stands for 1
    x_score: Tensor | None = None  # (num_src, H) `project(x, attn)` of ADDITIVE scores; None: not computed yet

    def reads_edges(self, how: Attention) -> bool:
        """Whether edge IDs matter: to dropout, and to find weights."""
        return how.dropout > 0 or self.weight is not None


class OnlineSoftmaxState(NamedTuple):
    """Sums over the edges so far, relative to exp(peak)."""

    out: Tensor  # (num_dst, H, D) weighted sum
    peak: Tensor  # (num_dst, H) the greatest score
    total: Tensor  # (num_dst, H) sum of the exponentials

    @classmethod
    def start(cls, num_dst: int, x: Tensor) -> OnlineSoftmaxState:
        """The sums over no edges, for source features like x, (*, H, D)."""
        out = x.new_zeros(num_dst, *x.shape[1:], dtype=accumulation_dtype(x.dtype))
        heads = out.new_zeros(num_dst, x.shape[1])
        return cls(out, torch.full_like(heads, -torch.inf), heads)

    def finish(self, in_degrees: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted mean, (num_dst, H, D), 0 without in-edges, and the normaliser of scores, (num_dst, 2, H).

        The normaliser is the peak and 1 / total: a weight is exp(score - peak) / total. One number, peak + log(total),
        would lose the total if scores are large.
        """
        total = self.total.masked_fill_((in_degrees == 0).unsqueeze(1), 1)
        out = self.out.div_(total.unsqueeze(2))
        return out, torch.stack([self.peak, total.reciprocal_()], 1)


def raise_peaks(peak: Tensor, sums: Sequence[Tensor], rows: Tensor | slice, greatest: Tensor) -> None:
    """Raise rows of peaks, (num_dst, H), to the greatest score, and shrink the sums that are relative to exp(peak)."""
    before = peak[rows]
    shrink = torch.where(greatest > before, (before - greatest).exp(), 1).unsqueeze(2)
    peak[rows] = greatest
    for total in sums:
        part = total[rows]  # of a slice, a view
        part.view(*greatest.shape, part.shape[1:].numel() // max(greatest.shape[1], 1)).mul_(shrink)
        if isinstance(rows, Tensor):
            total[rows] = part


class Gradients(NamedTuple):
    """Gradients of `AttentionOperands`, to which `attend_grad` adds; shapes as there."""

    x: Tensor
    y: Tensor
    attn: Tensor | None
    weight: Tensor | None
    x_score: Tensor | None = None
