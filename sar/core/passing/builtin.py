"""Sequential aggregation with rematerialisation, for the built-in message functions.

[Note: forward and backward]
The forward posts the first tiles, computes the own shard while they travel, and then takes the other partitions tile by
tile: what is fetched is consumed at once and its buffer used again. The backward is the transposed aggregation. It
fetches rows again exactly when the derivative of an operand that needs a gradient reads values of the sources
(`operand_values_needed`), and sends each tile's gradients home as they are made. Modes 2 and 3 keep the fetched rows
instead.

[Note: one worker's gradient is everybody's]
A backward that exchanges must run on all workers or on none. So what needs a gradient is the OR over workers, agreed on
in the forward, and the autograd node exists on every worker: it is tied to an empty tensor, the anchor, that requires a
gradient, and its output is marked non-differentiable where nobody needs one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sar.comm.buffers import BufferPool
from sar.comm.exchange import Exchange, Portion, Settings
from sar.comm.group import Group
from sar.comm.plan import Tile
from sar.comm.rows import FieldFormat, RowFormat
from sar.core.constants import Constant
from sar.core.passing.messages import Message, Operand
from sar.core.relation import Relation
from sar.errors import GraphError
from sar.kernels import (
    EdgeBlock,
    EdgeMessage,
    EdgeOperand,
    Op,
    Target,
    accumulation_dtype,
    add_rows,
    aggregate_cmp,
    aggregate_grad,
    aggregate_sum,
    edge_apply,
    index_dtype,
    message_shape,
    operand_values_needed,
)

LHS, RHS = 1, 2  # flags in the agreement: this operand needs a gradient here
CALL_ID_BIT = 2  # from this bit on: when a result at hand was made, see [Note: hits are joint]


class Saved(NamedTuple):
    """What a backward works with.

    needs: whether lhs and rhs need a gradient on some worker.
    values: the operands, where the derivatives read them.
    arg: winning edges of a maximum or minimum.
    kept: fetched source rows, where they are kept.
    """

    needs: dict[str, bool]
    values: dict[str, Tensor | None]
    arg: Tensor | None
    kept: dict[Tile, Tensor]


@dataclass(frozen=True)
class Call:
    """One built-in `update_all` (with a reducer) or `apply_edges` (without).

    lhs_shape, rhs_shape: trailing shapes of the operands.
    dtype: of the operands and the result; half precisions accumulate in float32.
    """

    group: Group
    pool: BufferPool
    relation: Relation
    message: Message
    reducer: str | None
    settings: Settings
    lhs_shape: tuple[int, ...]
    rhs_shape: tuple[int, ...] | None
    dtype: torch.dtype
    words: str

    @property
    def own_block(self) -> EdgeBlock:
        return self.relation.blocks[self.group.rank]

    @property
    def source(self) -> str | None:
        """Which operand has rows of sources, if any."""
        if self.message.lhs.target is Target.U:
            return "lhs"
        return "rhs" if self.message.rhs is not None and self.message.rhs.target is Target.U else None

    @property
    def distributed(self) -> bool:
        return self.source is not None and self.group.world_size > 1

    @property
    def sum_dtype(self) -> torch.dtype:
        return accumulation_dtype(self.dtype)

    def exchange(self, needs: dict[str, bool]) -> Exchange:
        """The exchange of this call, whose forward and backward have the same needs."""
        shape = self.lhs_shape if self.source == "lhs" else self.rhs_shape
        assert self.source is not None
        assert shape is not None
        widest = RowFormat((FieldFormat(self.sum_dtype, shape),))
        both_ways = needs.get(self.source, False) and self.values_needed(needs)[self.source]
        plan, settings = self.relation.plan, self.settings
        return Exchange(self.group, plan, settings, widest, self.pool, self.words, both_ways=both_ways)

    def target(self, operand: str) -> Target:
        side = self.message.lhs if operand == "lhs" else self.message.rhs
        return side.target if side is not None else Target.U

    def rows(self, target: Target) -> int:
        """Rows that an operand of this target has on this worker."""
        relation = self.relation
        return {Target.U: relation.num_src, Target.V: relation.num_dst, Target.E: relation.num_edges}[target]

    def backward_of_mean(self) -> tuple["Call", Tensor]:
        """A mean of copies as the sum of copies times 1 / in-degree, whose backward needs no copy of the gradient.

        Only the backward: sum and division in the forward make the mean of equal rows that row, exactly.

        Returns:
            The call, and its right operand, (N_dst, 1, ...).
        """
        weights = self.relation.inverse_degrees(self.dtype, len(self.lhs_shape))
        message = replace(self.message, op=Op.MUL, rhs=Operand(Target.V, "1 / in-degree"))
        return replace(self, message=message, reducer="sum", rhs_shape=tuple(weights.shape[1:])), weights

    def values_needed(self, needs: dict[str, bool]) -> dict[str, bool]:
        """Whether the backward reads the values of lhs and rhs."""
        pairs = [operand_values_needed(self.message.op, operand) for operand, need in needs.items() if need]
        return {"lhs": any(p[0] for p in pairs), "rhs": any(p[1] for p in pairs)}


def run(call: Call, lhs: Tensor, rhs: Tensor | None) -> Tensor:
    """Aggregate messages at their destinations, (N_dst, *message), or write them to the edges, (E, *message).

    Args:
        call: what to compute.
        lhs, rhs: operands, (rows of their target, *shape) each.
    """
    anchor = torch.empty(0, requires_grad=torch.is_grad_enabled() and call.distributed)
    operands = [lhs] if rhs is None else [lhs, rhs]
    constant = None
    if call.settings.cache and call.reducer is not None and not _needs_gradient(operands):
        constant = call.relation.constants.find((call.message, call.reducer, call.settings), operands)
    result: Tensor = _Builtin.apply(anchor, lhs, rhs, call, constant)
    return result


def _needs_gradient(operands: list[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)


def promoted(lhs: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor]:
    """Both operands in the wider of their floating-point dtypes under autocast, which mixes them; as given elsewhere.

    So does arithmetic in a Python message function. The conversion is the user's own rows', before they travel.
    """
    mixed = lhs.dtype != rhs.dtype and lhs.is_floating_point() and rhs.is_floating_point()
    if not mixed or not torch.is_autocast_enabled(lhs.device.type):
        return lhs, rhs
    dtype = torch.promote_types(lhs.dtype, rhs.dtype)
    return lhs.to(dtype), rhs.to(dtype)


def check_operands(message: Message, reducer: str | None, lhs: Tensor, rhs: Tensor | None) -> tuple[int, ...]:
    """The trailing shape of the messages.

    Raises:
        GraphError: for operands that do not broadcast, differ in dtype, or are not floating point.
    """
    if rhs is not None and lhs.dtype != rhs.dtype:
        raise GraphError(f"The operands of {message} have dtypes {lhs.dtype} and {rhs.dtype}; convert one of them.")
    copied = message.op is Op.COPY and reducer is None
    if not lhs.dtype.is_floating_point and not copied:
        raise GraphError(
            f"{message} is {lhs.dtype}; built-in arithmetic takes floating point. Call .float() on it first."
        )
    return message_shape(message.op, tuple(lhs.shape[1:]), tuple(rhs.shape[1:]) if rhs is not None else None)


class _Builtin(torch.autograd.Function):
    """See [Note: forward and backward]."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, lhs: Tensor, rhs: Tensor | None, call: Call, constant: Constant | None
    ) -> Tensor:
        known = constant.result if constant is not None else None
        flags = LHS * ctx.needs_input_grad[1] | RHS * ctx.needs_input_grad[2]
        if constant is not None:
            flags |= constant.call_id << CALL_ID_BIT
        with call.group.guard():
            everybodys = call.group.agree(call.words, flags) if call.distributed else [flags]
            if known is not None and all(theirs == flags for theirs in everybodys):
                result = known.detach()
                ctx.mark_non_differentiable(result)
                return result
            flags = reduce(or_, everybodys) & (LHS | RHS)
            ctx.call = call
            ctx.needs = {"lhs": bool(flags & LHS), "rhs": bool(flags & RHS)}
            reads = call.values_needed(ctx.needs)
            out, arg, kept = evaluate(call, lhs, rhs, ctx.needs)
        ctx.tiles = list(kept)
        ctx.save_for_backward(
            lhs if reads["lhs"] else None, rhs if reads["rhs"] else None, arg if flags else None, *kept.values()
        )
        if not flags:
            ctx.mark_non_differentiable(out)
            if constant is not None:
                constant.keep(out, call.group.call_id)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None, None, None]:
        call: Call = ctx.call
        with call.group.guard():
            lhs, rhs, arg, *rows = ctx.saved_tensors
            kept = dict(zip(ctx.tiles, rows, strict=True))
            grads = pull_back(call, Saved(ctx.needs, {"lhs": lhs, "rhs": rhs}, arg, kept), grad)
        return (
            None,
            grads["lhs"].to(call.dtype) if ctx.needs_input_grad[1] else None,
            grads["rhs"].to(call.dtype) if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


def evaluate(
    call: Call, lhs: Tensor, rhs: Tensor | None, needs: dict[str, bool]
) -> tuple[Tensor, Tensor | None, dict[Tile, Tensor]]:
    """The result of an agreed call, the winning edges of a maximum or minimum, and the fetched rows to keep."""
    keep = call.settings.keep and call.values_needed(needs).get(call.source or "", False)
    shape = message_shape(call.message.op, call.lhs_shape, call.rhs_shape)
    relation, device = call.relation, lhs.device
    arg = None
    if call.reducer is None:
        out = torch.empty(relation.num_edges, *shape, dtype=call.dtype, device=device)
    elif call.reducer in ("sum", "mean"):
        out = torch.zeros(relation.num_dst, *shape, dtype=call.sum_dtype, device=device)
    else:
        worst = -torch.inf if call.reducer == "max" else torch.inf
        out = torch.full((relation.num_dst, *shape), worst, dtype=call.sum_dtype, device=device)
        arg = torch.full(out.shape, -1, dtype=index_dtype(relation.num_edges), device=device)

    operands: dict[str, Tensor | None] = {"lhs": lhs, "rhs": rhs}
    kept = {}
    for block, rows, tile in _blocks(call, operands, needs, keep):
        if rows is not None and call.source is not None:
            operands[call.source] = rows
            if keep and tile is not None:
                kept[tile] = rows
        _accumulate(call, block, operands, out, arg)

    if call.reducer == "mean":
        out /= relation.degrees_like(out)
    elif arg is not None:
        # As DGL does, whether infinite for want of messages or by value.
        infinite = out.isinf()
        out.masked_fill_(infinite, 0)
        arg.masked_fill_(infinite, -1)
    return out.to(call.dtype), arg, kept


def _blocks(
    call: Call, operands: dict[str, Tensor | None], needs: dict[str, bool], keep: bool
) -> Iterator[tuple[EdgeBlock, Tensor | None, Tile | None]]:
    """All blocks of edges, the own one first, with the source rows of those that had to be fetched."""
    if not call.distributed or call.source is None:
        # Nothing to fetch: with operands of destinations and edges only, sources do not matter.
        for block in call.relation.blocks:
            yield block, None, None
        return
    own = operands[call.source]
    assert own is not None
    portions = call.exchange(needs).sweep(own.device, [own], keep=keep)
    yield call.own_block, None, None
    for portion in portions:
        assert portion.rows is not None
        yield call.relation.tile(portion.tile), portion.rows[0], portion.tile


def _accumulate(
    call: Call, block: EdgeBlock, operands: dict[str, Tensor | None], out: Tensor, arg: Tensor | None
) -> None:
    lhs, rhs = operands["lhs"], operands["rhs"]
    assert lhs is not None
    right = None if rhs is None else EdgeOperand.of(rhs, call.target("rhs"))
    message = EdgeMessage(call.message.op, EdgeOperand.of(lhs, call.target("lhs")), right)
    if call.reducer is None:
        edge_apply(block, message, out)
    elif arg is None:
        aggregate_sum(block, message, out)
    else:
        aggregate_cmp(block, message, out, arg, call.reducer == "max")


def pull_back(call: Call, saved: Saved, grad: Tensor) -> dict[str, Tensor]:
    """Gradients of both operands on this worker, for those that need one somewhere; agrees first where it exchanges."""
    values = dict(saved.values)
    grad = grad.to(call.sum_dtype)
    if call.reducer == "mean" and call.message.op is Op.COPY and call.dtype == call.sum_dtype:
        call, values["rhs"] = call.backward_of_mean()
    elif call.reducer == "mean":
        grad = grad / call.relation.degrees_like(grad)
    shapes = {"lhs": call.lhs_shape, "rhs": call.rhs_shape}
    grads = {
        operand: torch.zeros(
            call.rows(call.target(operand)), *(shapes[operand] or ()), dtype=call.sum_dtype, device=grad.device
        )
        for operand, need in saved.needs.items()
        if need
    }
    message_grad = EdgeOperand.of(grad, Target.E if call.reducer is None else Target.V)
    own_source_grad = grads.get(call.source) if call.source else None
    for block, rows, source_grad in _backward_blocks(call, saved, own_source_grad, grad.device):
        if rows is not None and call.source is not None:
            values[call.source] = rows
        left = EdgeOperand(values["lhs"], call.target("lhs"), call.lhs_shape)
        right = None if call.rhs_shape is None else EdgeOperand(values["rhs"], call.target("rhs"), call.rhs_shape)
        message = EdgeMessage(call.message.op, left, right)
        for operand in grads:
            out = source_grad if operand == call.source else grads[operand]
            assert out is not None
            aggregate_grad(block, message, operand, message_grad, out, arg=saved.arg)
    return grads


def _backward_blocks(
    call: Call, saved: Saved, own_grad: Tensor | None, device: torch.device
) -> Iterator[tuple[EdgeBlock, Tensor | None, Tensor | None]]:
    """All blocks of edges, with fetched source rows where their values are needed, and where source gradients go."""
    if not call.distributed or call.source is None:
        for block in call.relation.blocks:
            yield block, None, own_grad
        return
    own = saved.values[call.source] if not call.settings.keep else None
    if own_grad is not None or own is not None:
        call.group.agree(f"backward of {call.words}")

    def deliver(rows: Tensor, incoming: list[Tensor]) -> None:
        assert own_grad is not None
        add_rows(rows, incoming[0], own_grad)

    portions: Iterator[Portion] = call.exchange(saved.needs).sweep(
        device,
        [own] if own is not None else None,
        grads=RowFormat.of([own_grad]) if own_grad is not None else None,
        deliver=deliver,
    )
    yield call.own_block, None, own_grad
    for portion in portions:
        rows = portion.rows[0] if portion.rows is not None else saved.kept.get(portion.tile)
        yield call.relation.tile(portion.tile), rows, portion.grads[0] if portion.grads is not None else None
