"""Sequential aggregation with rematerialisation, for the built-in message functions.

[Note: forward and backward]
The forward posts the first tiles, computes the own shard while they travel, and then takes the other partitions tile by
tile: what is fetched is consumed at once and its buffer used again. The backward is the transposed aggregation. It
fetches rows again exactly when the derivative of an operand that needs a gradient reads values of the sources
(`operand_values_needed`), and returns each tile's gradients as they are made. Modes 2 and 3 keep the fetched rows
instead.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from sar.comm.exchange import Exchange, LocalFields, Tile
from sar.comm.halo_plan import HaloSlice
from sar.comm.rows import FieldFormat, RowFormat
from sar.core.collective import CallContext, Collective, Made
from sar.core.passing.gather import Combined, Reduction
from sar.core.passing.messages import Message
from sar.core.relation import Constant
from sar.errors import GraphError
from sar.kernels import (
    EdgeBlock,
    EdgeMessage,
    EdgeOperand,
    Op,
    Target,
    accumulation_dtype,
    aggregate_cmp,
    aggregate_grad,
    aggregate_sum,
    edge_apply,
    operand_values_needed,
)
from sar.outofcore.residency import roomy

SIDES = ("lhs", "rhs")
ALL_SIDES = 0b11
CALL_ID_BIT = 2  # from this bit on: when a result at hand was made, see [Note: hits are joint]

Values = Sequence[Tensor | None]
"""Operands or their gradients: of the left one, and of the right one where there is one."""


@dataclass
class Aggregated:
    """What a forward makes: the result, the edges of maxima or minima, and fetched source rows to keep."""

    out: Tensor
    argmax: Tensor | None
    kept: dict[HaloSlice, Tensor] = field(default_factory=dict)


class BuiltinMessages:
    """One message function of two operands at most, and its reducer: the computation, both ways, without agreement.

    Args:
        context: where it takes place.
        message: what each edge sends.
        reducer: sum, mean, max or min; None to write messages to the edges.
        lhs, rhs: operands, (rows of their target, ...); half precisions accumulate in float32.

    Raises:
        GraphError: for operands that do not broadcast, differ in dtype, or are not floating point.
    """

    def __init__(
        self, context: CallContext, message: Message, reducer: str | None, lhs: Tensor, rhs: Tensor | None = None
    ) -> None:
        self.context = context
        self.relation = context.relation
        self.reducer = reducer
        _check(message, reducer, lhs, rhs)
        right = None
        if message.rhs is not None and rhs is not None:
            right = EdgeOperand(None, message.rhs.target, tuple(rhs.shape[1:]))
        self.message = EdgeMessage(message.op, EdgeOperand(None, message.lhs.target, tuple(lhs.shape[1:])), right)
        self.operands = self.message.operands
        self.dtype = lhs.dtype
        self.sum_dtype = accumulation_dtype(lhs.dtype)
        self.reduction = Reduction(self.relation, reducer, self.dtype, self.message.shape)
        what = f"update_all, {reducer}" if reducer else "apply_edges"
        shapes = " and ".join(str(operand.shape) for operand in self.operands)
        self.signature = context.signature(f"{what} of {message}: {lhs.dtype}, widths {shapes}")

    @property
    def source(self) -> int | None:
        """Which operand has rows of sources, if any."""
        return next((i for i, operand in enumerate(self.operands) if operand.target is Target.U), None)

    @property
    def distributed(self) -> bool:
        """Whether rows of other workers take part."""
        return self.source is not None and self.context.group.world_size > 1

    def values_needed(self, needed: int) -> list[bool]:
        """Whether the backward reads the values of each operand, where the operands with these bits need gradients."""
        pairs = [operand_values_needed(self.message.op, side) for i, side in enumerate(SIDES) if needed >> i & 1]
        return [any(pair[i] for pair in pairs) for i in range(len(self.operands))]

    def rows_needed(self, needed: int) -> bool:
        """Whether the backward reads the values of source rows."""
        return self.source is not None and self.values_needed(needed)[self.source]

    def exchange(self, needed: int) -> Exchange:
        """The exchange of the call, whose forward and backward have the same needs."""
        assert self.source is not None
        widest = RowFormat((FieldFormat(self.sum_dtype, self.operands[self.source].shape),))
        both_ways = bool(needed >> self.source & 1) and self.rows_needed(needed)
        return self.context.exchange(widest, self.signature, both_ways=both_ways)

    # -- forward

    def aggregate(self, operands: Values, needed: int) -> Aggregated:
        """The result of an agreed call."""
        received = None
        own = None if self.source is None else operands[self.source]
        keep = self.context.settings.keep and self.rows_needed(needed)
        kept: dict[HaloSlice, Tensor] = {}
        if self.distributed and own is not None:
            received = self.exchange(needed).exchange_tiles(own.device, [own], keep=keep, local=LocalFields())
        made = self.reduction.start()  # not before the turn of a virtual worker may pass
        for piece in self.context.pieces(received):
            here = list(operands)
            if piece.tile is not None and piece.rows is not None and self.source is not None:
                here[self.source] = piece.rows[0]
                if keep:
                    kept[piece.tile] = piece.rows[0]
            self._accumulate(piece.block, here, made)
        return Aggregated(self.reduction.finish(made), made.argmax, kept)

    def _accumulate(self, block: EdgeBlock, operands: Values, made: Combined) -> None:
        message = _with_values(self.message, operands)
        if self.reducer is None:
            edge_apply(block, message, made.total)
        elif made.argmax is None:
            aggregate_sum(block, message, made.total)
        else:
            aggregate_cmp(block, message, made.total, made.argmax, self.reducer == "max")

    # -- backward

    def exchanges_in_backward(self, needed: int) -> bool:
        """Whether the backward fetches rows or returns gradients."""
        if not self.distributed or self.source is None:
            return False
        return bool(needed >> self.source & 1) or (self.rows_needed(needed) and not self.context.settings.keep)

    def pull_back(self, operands: Values, made: Aggregated, grad: Tensor, needed: int) -> list[Tensor | None]:
        """Gradients of the operands on this worker, for those that need one somewhere; the backward is agreed on.

        Args:
            operands: where the derivatives read their values.
            made: by the forward; `out` is not read.
            grad: of the result.
            needed: bit i for operand i.
        """
        grad = grad.to(self.sum_dtype)
        if self.reducer == "mean" and self.message.op is Op.COPY and self.dtype == self.sum_dtype:
            return self._pull_back_mean(made, grad, needed)
        if self.reducer == "mean":
            grad = grad / self.relation.degrees_like(grad)
        return self._sweep_back(self.message, operands, made, grad, needed)

    def _pull_back_mean(self, made: Aggregated, grad: Tensor, needed: int) -> list[Tensor | None]:
        """As `pull_back`, of a mean of copies as the sum of copies times 1 / in-degree, without a copy of the gradient.

        Only the backward: sum and division in the forward make the mean of equal rows that row, exactly.
        """
        weights = self.relation.inverse_degrees(self.dtype, len(self.operands[0].shape))
        message = EdgeMessage(Op.MUL, self.operands[0], EdgeOperand.of(weights, Target.V))
        return self._sweep_back(message, [None, weights], made, grad, needed)[:1]

    def _sweep_back(
        self, message: EdgeMessage, operands: Values, made: Aggregated, grad: Tensor, needed: int
    ) -> list[Tensor | None]:
        gradient = EdgeOperand.of(grad, Target.E if self.reducer is None else Target.V)
        grads = [
            self._zeros(spec, grad.device, leaves=i == self.source) if needed >> i & 1 else None
            for i, spec in enumerate(message.operands)
        ]
        for piece in self.context.pieces(self._post_backward(operands, grads, needed, grad.device)):
            here, here_grads = list(operands), list(grads)
            if piece.tile is not None and self.source is not None:
                here[self.source] = made.kept.get(piece.tile) if piece.rows is None else piece.rows[0]
                here_grads[self.source] = None if piece.grads is None else piece.grads[0]
            for i, out in enumerate(here_grads):
                if out is not None:
                    filled = _with_values(message, here)
                    aggregate_grad(piece.block, filled, SIDES[i], gradient, out, arg=made.argmax)
        return grads

    def _zeros(self, spec: EdgeOperand, device: torch.device, *, leaves: bool) -> Tensor:
        """For a gradient; of what `leaves`, turns of virtual workers pass before it is complete."""
        relation = self.relation
        rows = {Target.U: relation.num_src, Target.V: relation.num_dst, Target.E: relation.num_edges}[spec.target]
        if leaves:
            return roomy((rows, *spec.shape), self.sum_dtype, device, zeros=True)
        return torch.zeros(rows, *spec.shape, dtype=self.sum_dtype, device=device)

    def _post_backward(
        self, operands: Values, grads: Values, needed: int, device: torch.device
    ) -> Iterator[Tile] | None:
        """Start to fetch source rows where their values are needed, and to return their gradients."""
        if not self.distributed or self.source is None:
            return None
        own, own_grad = operands[self.source], grads[self.source]
        return self.exchange(needed).exchange_tiles(
            device,
            None if own is None or self.context.settings.keep else [own],
            keep=self.context.settings.keep and self.rows_needed(needed),
            local=LocalFields(),
            returns=None if own_grad is None else self.context.return_to([own_grad]),
        )


class BuiltinCall(Collective):
    """`update_all` or `apply_edges` of a built-in message function: see [Note: forward and backward]."""

    def __init__(self, messages: BuiltinMessages, constant: Constant | None) -> None:
        super().__init__(messages.context.group, messages.signature, distributed=messages.distributed)
        self.messages = messages
        self.constant = constant
        self.hit = False  # whether all workers hold the result of one earlier call
        self.kept: list[HaloSlice] = []

    @property
    def backward_communicates(self) -> bool:
        return self.messages.exchanges_in_backward(self.needed)

    def flags(self) -> int:
        call_id = 0 if self.constant is None else self.constant.call_id
        return super().flags() | call_id << CALL_ID_BIT

    def agreed(self, flags: list[int]) -> None:
        self.needed = reduce(or_, flags) & ALL_SIDES
        self.hit = flags[0] >> CALL_ID_BIT > 0 and all(theirs == flags[0] for theirs in flags)

    def forward(self, *operands: Any) -> Made:
        known = self.constant.result if self.hit and self.constant is not None else None
        if known is not None:
            return Made((known,))
        made = self.messages.aggregate(operands, self.needed)
        self.kept = list(made.kept)
        if self.constant is not None and not self.needed and self.group is not None:
            self.constant.keep(made.out, self.group.call_id)
        reads = self.messages.values_needed(self.needed)
        values = [operand if read else None for operand, read in zip(operands, reads, strict=True)]
        return Made((made.out,), [*values, made.argmax, *made.kept.values()])

    def backward(self, saved: list[Any], *grads: Tensor) -> list[Tensor | None]:
        count = len(self.messages.operands)
        values, argmax, rows = saved[:count], saved[count], saved[count + 1 :]
        made = Aggregated(grads[0], argmax, dict(zip(self.kept, rows, strict=True)))
        return self.messages.pull_back(values, made, grads[0], self.needed)


def run(messages: BuiltinMessages, lhs: Tensor, rhs: Tensor | None = None) -> Tensor:
    """Aggregate messages at their destinations, (N_dst, *message), or write them to the edges, (E, *message)."""
    operands = [lhs] if rhs is None else [lhs, rhs]
    context, constant = messages.context, None
    needs_gradient = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
    # Where nothing travels, comparing operands would cost as much as computing.
    if context.settings.cache and messages.distributed and messages.reducer is not None and not needs_gradient:
        call = (messages.message, messages.reducer, context.settings)
        constant = context.relation.constants.find(call, operands)
    return BuiltinCall(messages, constant).apply(*operands)[0]


def promoted(lhs: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor]:
    """Both operands in the wider of their floating-point dtypes under autocast, which mixes them; as given elsewhere.

    So does arithmetic in a Python message function. The conversion is the user's own rows', before they travel.
    """
    mixed = lhs.dtype != rhs.dtype and lhs.is_floating_point() and rhs.is_floating_point()
    if not mixed or not torch.is_autocast_enabled(lhs.device.type):
        return lhs, rhs
    dtype = torch.promote_types(lhs.dtype, rhs.dtype)
    return lhs.to(dtype), rhs.to(dtype)


def _with_values(message: EdgeMessage, values: Values) -> EdgeMessage:
    lhs, *rhs = (replace(operand, values=given) for operand, given in zip(message.operands, values, strict=True))
    return EdgeMessage(message.op, lhs, *rhs)


def _check(message: Message, reducer: str | None, lhs: Tensor, rhs: Tensor | None) -> None:
    if rhs is not None and lhs.dtype != rhs.dtype:
        raise GraphError(f"The operands of {message} have dtypes {lhs.dtype} and {rhs.dtype}; convert one of them.")
    copied = message.op is Op.COPY and reducer is None
    if not lhs.dtype.is_floating_point and not copied:
        raise GraphError(
            f"{message} is {lhs.dtype}; built-in arithmetic takes floating point. Call .float() on it first."
        )
