"""Built-in message functions: reading DGL's, and their forward and backward.

[Note: forward and backward]
The forward posts the first tiles, computes the worker's own shard while they travel, and then takes the other
partitions tile by tile: each tile is consumed at once and its buffer used again. The backward is the transposed
aggregation. It fetches rows again if and only if the derivative of an operand that needs a gradient reads values of the
sources (`operand_values_needed`). It returns the gradients of each tile as soon as they are computed. Modes 2 and 3
keep the fetched rows instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from sar.comm.exchange import Layout
from sar.comm.rows import FieldFormat, RowFormat
from sar.comm.tiles import GradientReturn, LocalFields
from sar.core.collective import CallContext, ForwardOutput
from sar.core.eager import uncompiled
from sar.core.overlap import Overlapping, Steps
from sar.core.passing.reductions import Reduction
from sar.errors import GraphError
from sar.kernels import (
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
    operand_values_needed,
)
from sar.spillable import empty_spillable

SIDES = ("lhs", "rhs")

Values = Sequence[Tensor | None]
"""The left operand and the right one, if there is one; or their gradients."""

Function = TypeVar("Function", bound=Callable[..., Any])

TARGETS = tuple(Target)
OPERATORS = {op.value: op for op in Op}
REDUCERS = ("sum", "mean", "max", "min")
REAL_ONLY = "built-in arithmetic takes floating point. Call .float() or, on complex numbers, torch.view_as_real first."


class Operand(NamedTuple):
    """A field that a message reads: of sources, destinations or edges."""

    target: Target
    field: str

    def __str__(self) -> str:
        return f"{self.target.name.lower()}[{self.field!r}]"


class Message(NamedTuple):
    """A built-in message function: op(lhs, rhs) per edge; `rhs` is None for a copy."""

    op: Op
    lhs: Operand
    rhs: Operand | None
    out_field: str

    def __str__(self) -> str:
        return f"{self.op.name.lower()}({self.lhs}{f', {self.rhs}' if self.rhs else ''})"


COPY_SOURCE = Message(Op.COPY, Operand(Target.U, "values"), None, "values")
"""The row of each edge's source."""
SCALED_SOURCE = Message(Op.MUL, Operand(Target.U, "values"), Operand(Target.V, "factors"), "values")
"""The row of each edge's source times a number of its destination."""


def is_python(function: Any) -> bool:
    """Whether a message or reduce function is a Python function, not one of `dgl.function`."""
    return callable(function) and not hasattr(function, "out_field")


def parse_message(function: Any) -> Message:
    """Read a built-in message function."""
    if hasattr(function, "binary_op"):
        lhs = Operand(TARGETS[function.lhs], function.lhs_field)
        rhs, op = Operand(TARGETS[function.rhs], function.rhs_field), OPERATORS[function.binary_op]
        if op is Op.MUL and (lhs.target, rhs.target) == (Target.E, Target.U):
            lhs, rhs = rhs, lhs  # the order that kernels are compiled for
        return Message(op, lhs, rhs, function.out_field)
    if hasattr(function, "in_field") and hasattr(function, "target"):
        return Message(Op.COPY, Operand(TARGETS[function.target], function.in_field), None, function.out_field)
    name = repr(getattr(function, "name", function))
    raise GraphError(f"{name} is not a message function; expected one of dgl.function, or a Python function.")


def parse_reduction(function: Any, message_field: str | None) -> tuple[str, str]:
    """Read a built-in reducer: its name and its output field. `message_field` is that of the message function."""
    if not hasattr(function, "msg_field") or function.name not in REDUCERS:
        name = repr(getattr(function, "name", function))
        raise GraphError(f"{name} is not a reducer; expected {', '.join(REDUCERS)} of dgl.function, or a function.")
    if message_field is not None and function.msg_field != message_field:
        raise GraphError(
            f"The message function makes {message_field!r}, but the reducer reads {function.msg_field!r}; use one name "
            "for both."
        )
    return function.name, function.out_field


def message_has_parameters(param_fn: Callable[..., Any]) -> Callable[[Function], Function]:
    """Accept SAR's declaration of a message function's parameters, which sar does not need.

    Args:
        param_fn: ignored.

    Returns:
        A decorator that returns its function unchanged.
    """
    return lambda function: function


@uncompiled
def aggregate(
    context: CallContext, message: Message, reducer: str | None, lhs: Tensor, rhs: Tensor | None = None
) -> Tensor:
    """Call a built-in message function. This is a collective call if the function reads sources.

    Args:
        reducer: sum, mean, max or min; None to write messages to the edges.
        lhs, rhs: operands, (rows of their target, ...), which broadcast; half precisions accumulate in float32.

    Returns:
        The messages combined at their destinations, (N_dst, *message), or written to the edges, (E, *message).
    """
    operands = (lhs,) if rhs is None else (lhs, rhs)
    if rhs is not None and lhs.dtype != rhs.dtype and torch.is_autocast_enabled(lhs.device.type):  # which mixes dtypes
        dtype = torch.promote_types(lhs.dtype, rhs.dtype)
        if lhs.is_floating_point() and rhs.is_floating_point():
            operands = lhs.to(dtype), rhs.to(dtype)
    return BuiltinCall(context, Operation.of(context, message, reducer, operands)).apply(*operands)[0]


def copy_to_edges(context: CallContext, values: Tensor) -> Tensor:
    """The row of each edge's source, (E, ...), of (N_src, ...) values; a collective call."""
    return aggregate(context, COPY_SOURCE, None, values)


OPERATIONS = 32
"""Number of operations that a relation caches."""


@dataclass(frozen=True, eq=False)
class Operation:
    """A message function and its reducer, compiled for one graph, settings, shapes and dtypes of operands.

    The relation caches it. It has no reference to the relation, so that unused graphs are freed.
    """

    message: EdgeMessage  # without values
    reducer: str | None
    source: int | None  # index of the operand with rows of sources
    dtype: torch.dtype
    sum_dtype: torch.dtype
    signature: str
    widest: RowFormat | None  # widest rows that travel in either direction; None without sources
    # Whether the backward reads the values of each operand, by the operands whose gradients are needed, as bits.
    values_read: tuple[tuple[bool, ...], ...]
    layouts: dict[bool, Layout] = field(default_factory=dict)  # by whether an exchange goes both ways, on first use

    @classmethod
    def of(cls, context: CallContext, message: Message, reducer: str | None, operands: Sequence[Tensor]) -> "Operation":
        """The relation's cached operation, or a new one, for operands that can be used."""
        operations = context.relation.operations
        shapes = tuple([(x.dtype, x.shape[1:]) for x in operands])
        key = (message, reducer, shapes, context.settings, context.structure.signature, torch.is_grad_enabled())
        operation: Operation | None = operations.get(key)
        if operation is not None:
            return operation
        dtype, *others = (operand.dtype for operand in operands)
        if others and dtype != others[0]:
            raise GraphError(f"The operands of {message} have dtypes {dtype} and {others[0]}; convert one of them.")
        if not dtype.is_floating_point and not (message.op is Op.COPY and reducer is None):
            raise GraphError(f"{message} is {dtype}; {REAL_ONLY}")
        sides = [message.lhs] if message.rhs is None else [message.lhs, message.rhs]
        lhs, *rhs = (
            EdgeOperand(None, side.target, tuple(operand.shape[1:]))
            for side, operand in zip(sides, operands, strict=True)
        )
        spec = EdgeMessage(message.op, lhs, *rhs)
        source = next((i for i, operand in enumerate(spec.operands) if operand.target is Target.U), None)
        what = f"update_all, {reducer}" if reducer else "apply_edges"
        widths = " and ".join(str(operand.shape) for operand in spec.operands)
        signature = context.signature(f"{what} of {message}: {dtype}, widths {widths}")
        sum_dtype = accumulation_dtype(dtype)
        widest = None if source is None else RowFormat((FieldFormat(sum_dtype, spec.operands[source].shape),))
        count = len(sides)
        reads = [operand_values_needed(message.op, side) for side in SIDES[:count]]
        values_read = tuple(
            tuple(any(needed >> i & 1 and reads[i][k] for i in range(count)) for k in range(count))
            for needed in range(4)
        )
        operation = operations[key] = cls(spec, reducer, source, dtype, sum_dtype, signature, widest, values_read)
        if len(operations) > OPERATIONS:
            del operations[next(iter(operations))]
        return operation


class BuiltinCall(Overlapping):
    """One call of an operation: see [Note: forward and backward]."""

    def __init__(self, context: CallContext, operation: Operation) -> None:
        super().__init__(context, operation.signature, distributed=operation.source is not None)
        self.operation = operation
        self.message = operation.message
        self.source = operation.source
        self.reduction = Reduction(context.relation, operation.reducer, operation.dtype, operation.message.shape)
        self.reducer = self.reduction.reducer

    @property
    def rows_needed(self) -> bool:
        return self.source is not None and self.operation.values_read[self.needed & 3][self.source]

    @property
    def backward_communicates(self) -> bool:
        """Whether the backward fetches rows or returns gradients."""
        if not self.distributed or self.source is None:
            return False
        return bool(self.needed >> self.source & 1) or (self.rows_needed and not self.context.settings.keep)

    def layout(self, fields: Sequence[Tensor]) -> Layout:
        assert self.source is not None
        assert self.operation.widest is not None
        layouts, both_ways = self.operation.layouts, bool(self.needed >> self.source & 1) and self.rows_needed
        if both_ways not in layouts:
            plan, settings = self.relation.plan, self.context.settings
            layouts[both_ways] = Layout.of(plan, settings, self.operation.widest, both_ways=both_ways)
        return layouts[both_ways]

    # -- forward

    def forward_steps(self, *operands: Any) -> Steps:
        source = self.source
        tiles = self.tiles(None if source is None else [operands[source]], local=LocalFields())
        if self.distributed:
            yield
        # Allocated only after this worker's turn may have passed. The own block, which comes first, fills it.
        combined, fresh = self.reduction.start(filled=False), True
        for block, tile in tiles:
            values = operands
            if tile.rows is not None and source is not None:
                values = (*operands[:source], tile.rows[0], *operands[source + 1 :])
            message = self.message.with_values(values)
            if self.reducer is None:
                edge_apply(block, message, combined.total)
            elif combined.argmax is None:
                aggregate_sum(block, message, combined.total, fresh=fresh)
                fresh = False
            else:
                aggregate_cmp(block, message, combined.total, combined.argmax, self.reducer == "max")
        out = self.reduction.finish(combined)
        read = self.operation.values_read[self.needed & 3]
        saved = [operand if is_read else None for operand, is_read in zip(operands, read, strict=True)]
        return ForwardOutput((out,), [*saved, combined.argmax])

    # -- backward

    def backward_steps(self, saved: list[Any], *grads: Tensor) -> Steps:
        *values, argmax = saved
        grad, message, count = grads[0], self.message, len(values)
        if self.reducer == "mean" and message.op is Op.COPY:
            # Compute the backward of a sum of copies times 1 / in-degree, which needs no copy of the gradient. The
            # forward divides the sum instead, so that the mean of equal rows is exactly that row.
            weights = self.relation.degrees(self.operation.sum_dtype, 1 + len(message.lhs.shape)).reciprocal()
            message, values = EdgeMessage(Op.MUL, message.lhs, EdgeOperand.of(weights, Target.V)), [None, weights]
        elif self.reducer == "mean":
            grad = self.reduction.total_grad(grad)
        input_grads = yield from self.gradients(message, values, grad, self.needed, argmax)
        return input_grads[:count]

    def gradients(
        self,
        message: EdgeMessage,
        values: Values,
        grad: Tensor,
        needed: int,
        argmax: Tensor | None = None,
    ) -> Steps:
        """Compute the gradients of this worker's operands, after the agreement on the backward.

        Args:
            values: the operands whose values the derivatives read; None for the others.
            grad: gradient of the result, before the division of means.
            needed: operands that need a gradient on any worker, as bits.
            argmax: edges of the maxima or minima.
        """
        gradient = EdgeOperand.of(grad, Target.E if self.reducer is None else Target.V)
        relation, dtype = self.relation, self.operation.sum_dtype
        rows = {Target.U: relation.num_src, Target.V: relation.num_dst, Target.E: relation.num_edges}
        grads: list[Tensor | None] = [None] * len(message.operands)
        # Workers of the same process add to gradients of sources in their turns; else the own block comes first.
        fresh = len(self.context.structure.group.local_peers) == 1
        for i, spec in enumerate(message.operands):
            shape = rows[spec.target], *spec.shape
            if needed >> i & 1 and i == self.source:
                grads[i] = empty_spillable(shape, dtype, grad.device, zeros=not fresh)
            elif needed >> i & 1:
                grads[i] = torch.zeros(shape, dtype=dtype, device=grad.device)
        own, own_grad = (None, None) if self.source is None else (values[self.source], grads[self.source])
        tiles = self.tiles(
            None if own is None else [own],
            backward=True,
            local=LocalFields(),
            returns=None if own_grad is None else GradientReturn([own_grad], add_rows),
        )
        for block, tile in tiles:
            tile_values, tile_grads = list(values), list(grads)
            if tile.halo is None:
                yield  # other work may run while the first messages travel
            if tile.halo is not None and self.source is not None:
                tile_values[self.source] = None if tile.rows is None else tile.rows[0]
                tile_grads[self.source] = None if tile.grads is None else tile.grads[0]
            for i, out in enumerate(tile_grads):
                if out is not None:
                    first = fresh and i == self.source and tile.halo is None
                    operands = message.with_values(tile_values)
                    aggregate_grad(block, operands, SIDES[i], gradient, out, arg=argmax, fresh=first)
            fresh = fresh and tile.halo is not None
        return grads
