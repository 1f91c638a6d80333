"""Message passing along one relation: DGL's functions, and the forward and backward of its built-in messages.

`send_and_reduce` is `update_all` along a relation, and `aggregate` the call of a built-in message function. Python
message functions are in `python_messages.py`, Python reduce functions in `batches.py`.

[Note: forward and backward]
The forward posts the first tiles, computes the worker's own shard while they travel, and then takes the other
partitions tile by tile: each tile is consumed at once and its buffer used again. The backward is the transposed
aggregation. It fetches rows again if and only if the derivative of an operand that needs a gradient reads values of the
sources (`operand_values_needed`). It returns the gradients of each tile as soon as they are computed. Modes 2 and 3
keep the fetched rows instead.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import _StopRecomputationError

from sar.comm.tiles import GradientReturn, LocalFields
from sar.core.collective import CallContext, ForwardOutput, Operation, TileCall, uncompiled, widest_rows
from sar.core.modules import is_autocast
from sar.core.passing.batches import EdgeFields, reduce_mailboxes
from sar.core.passing.python_messages import run_python
from sar.core.passing.reducers import REAL_ONLY, REDUCERS, UNFILLED
from sar.errors import GraphError
from sar.host.per_thread import PerThread
from sar.kernels import (
    EdgeMessage,
    EdgeOperand,
    Op,
    Target,
    accumulation_dtype,
    add_rows,
    aggregate_grad,
    operand_values_needed,
)
from sar.tensors.views import HALF_BITS

SIDES = ("lhs", "rhs")

Function = TypeVar("Function", bound=Callable[..., Any])

TARGETS = tuple(Target)
OPERATORS = {op.value: op for op in Op}
BUILTIN_REDUCERS = ("sum", "mean", "max", "min")

# -- DGL's functions


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
PRODUCTS = Operand(Target.U, "feature @ weight, as no module has hooks")  # so that all workers have to agree on it


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


def message_has_parameters(param_fn: Callable[..., Any]) -> Callable[[Function], Function]:
    """Accept SAR's declaration of a message function's parameters. It has no effect; sar finds the parameters itself.

    Args:
        param_fn: ignored.

    Returns:
        A decorator that returns its function unchanged.
    """
    return lambda function: function


def send_and_reduce(
    context: CallContext, fields: EdgeFields, message_func: Any, reduce_func: Any, *, fill: bool = True
) -> dict[str, Tensor]:
    """Compute new fields of the destinations, (N_dst, ...) each: `update_all` along one relation.

    Without `fill`, results are those that DGL combines across relations: maxima and minima without messages are
    infinite if the relation has any edge, and a Python reduce function is not called if it has none.
    """
    has_edges = context.relation.num_edges_global > 0
    if is_python(reduce_func):
        if not fill and not has_edges:
            return {}
        messages, has_peers = compute_on_edges(context, fields, message_func), context.structure.group.world_size > 1
        return reduce_mailboxes(context.relation, reduce_func, messages, fields.dst, has_peers)
    message = None if is_python(message_func) else parse_message(message_func)
    if not hasattr(reduce_func, "msg_field") or reduce_func.name not in BUILTIN_REDUCERS:
        name, known = repr(getattr(reduce_func, "name", reduce_func)), ", ".join(BUILTIN_REDUCERS)
        raise GraphError(f"{name} is not a reducer; expected {known} of dgl.function, or a function.")
    field, reducer = reduce_func.msg_field, reduce_func.name
    if reducer in ("max", "min") and not fill and has_edges:
        reducer = UNFILLED + reducer
    if message is None:
        return {reduce_func.out_field: run_python(context, message_func, fields, reducer, field)[field]}
    if field != message.out_field:
        raise GraphError(
            f"The message function makes {message.out_field!r}, but the reducer reads {field!r}; use one name for both."
        )
    return {reduce_func.out_field: _aggregate_fields(context, fields, message, reducer)}


def compute_on_edges(context: CallContext, fields: EdgeFields, function: Any) -> dict[str, Tensor]:
    """Compute new fields of the edges, (E, ...) each: `apply_edges` along one relation."""
    if is_python(function):
        return run_python(context, function, fields, None, None)
    message = parse_message(function)
    return {message.out_field: _aggregate_fields(context, fields, message, None)}


def _aggregate_fields(context: CallContext, fields: EdgeFields, message: Message, reducer: str | None) -> Tensor:
    # `fields` are in the order of `Target`.
    lhs, rhs = fields[message.lhs.target][message.lhs.field], message.rhs
    return aggregate(context, message, reducer, lhs, None if rhs is None else fields[rhs.target][rhs.field])


# -- calls of built-in messages


waiting_work = PerThread[Callable[[], Tensor] | None](None)
"""The work of `meanwhile`, until a call takes it."""


@contextmanager
def meanwhile(work: Callable[[], Tensor]) -> Iterator[Callable[[], Tensor]]:
    """Context for other work of a layer, such as `fc_self` of `SAGEConv`, that need not wait for a call's messages.

    The first built-in call inside runs it once its first messages travel. The context yields a function that returns
    the result, which it computes on first use if no call has done so.
    """
    with_gradients = torch.is_grad_enabled()  # gradients are off within a call

    @cache
    def result() -> Tensor:
        with torch.set_grad_enabled(with_gradients):
            return work()

    with waiting_work.set_to(result):
        yield result


def multiplies_first(context: CallContext, source: Tensor, width: int, product_width: int) -> bool:
    """Whether a product comes before a sum over in-edges: narrower rows travel, or no tensor of sums is saved.

    Features without a gradient are summed first if widths are equal, because their sum then needs no backward exchange.
    """
    src, _, dst = context.relation.etype
    equal = width == product_width and source.requires_grad and src == dst and not context.structure.is_block
    return width > product_width or equal


@uncompiled
def aggregate(
    context: CallContext, message: Message, reducer: str | None, lhs: Tensor, rhs: Tensor | None = None
) -> Tensor:
    """Call a built-in message function. This is a collective call if the function reads sources.

    Args:
        reducer: sum, mean, max or min; None to write messages to the edges.
        lhs, rhs: operands, (rows of their target, ...), which broadcast; half precisions accumulate in float32.

    Returns:
        The messages combined at their destinations, (N_dst, *message), or written to the edges, (E, *message). If
        autocast mixes dtypes, the result has the widest. Half precisions still travel as they are.
    """
    operands: tuple[Tensor, ...] = (lhs,)
    shapes: tuple[Any, ...] = (lhs.dtype, lhs.shape[1:])
    if rhs is not None:
        if lhs.dtype != rhs.dtype:
            if not (is_autocast(lhs) and lhs.is_floating_point() and rhs.is_floating_point()):
                raise GraphError(
                    f"The operands of {message} have dtypes {lhs.dtype} and {rhs.dtype}; convert one of them."
                )
            if torch.float64 in (lhs.dtype, rhs.dtype):  # which kernels do not mix
                lhs, rhs = lhs.double(), rhs.double()
        operands, shapes = (lhs, rhs), (lhs.dtype, lhs.shape[1:], rhs.dtype, rhs.shape[1:])
    operation = context.operation(
        (message, reducer, shapes), lambda: MessageOperation.compile(context, message, reducer, operands)
    )
    return BuiltinCall(context, operation).apply(*operands)[0]


def copy_to_edges(context: CallContext, values: Tensor) -> Tensor:
    """The row of each edge's source, (E, ...), of (N_src, ...) values; a collective call."""
    return aggregate(context, COPY_SOURCE, None, values)


class BackwardPlan(NamedTuple):
    """What the backward of an operation does; equal on all workers."""

    needed: list[int]  # operands that need a gradient on any worker
    reads: list[bool]  # whether the derivatives read the values of each operand
    fetches: bool  # whether these are rows of the sources
    returns: bool  # whether the sources need a gradient


@dataclass(eq=False)
class MessageOperation(Operation):
    """A message function and its reducer, compiled for one graph, settings, shapes and dtypes of operands."""

    message: EdgeMessage  # without values
    reducer: str | None
    source: int | None  # index of the operand with rows of sources
    dtype: torch.dtype
    sum_dtype: torch.dtype
    plans: list[BackwardPlan]  # by `Collective.needed`

    @classmethod
    def compile(
        cls, context: CallContext, message: Message, reducer: str | None, operands: Sequence[Tensor]
    ) -> "MessageOperation":
        """Check the operands, and compile."""
        dtypes = [operand.dtype for operand in operands]
        dtype = reduce(torch.promote_types, dtypes)
        if not dtype.is_floating_point and not (message.op is Op.COPY and reducer is None):
            raise GraphError(f"{message} is {dtype}; {REAL_ONLY}")
        sides = [side for side in (message.lhs, message.rhs) if side is not None]
        shapes = [tuple(operand.shape[1:]) for operand in operands]
        spec = EdgeMessage(
            message.op, *(EdgeOperand(None, side.target, shape) for side, shape in zip(sides, shapes, strict=True))
        )
        source = next((i for i, side in enumerate(sides) if side.target is Target.U), None)
        reads = [operand_values_needed(message.op, side) for side in SIDES]
        plans = []
        for bits in range(2 ** len(sides)):
            needed = [i for i in range(len(sides)) if bits >> i & 1]
            is_read = [any(reads[i][k] for i in needed) for k in range(len(sides))]
            plans.append(BackwardPlan(needed, is_read, source is not None and is_read[source], source in needed))
        what = f"update_all, {reducer}" if reducer else "apply_edges"
        kinds = " and ".join(dict.fromkeys(map(str, dtypes)))
        return cls(
            context.signature(f"{what} of {message}: {kinds}, widths {' and '.join(map(str, shapes))}"),
            None if source is None else widest_rows([operands[source]]),
            spec,
            reducer,
            source,
            dtype,
            accumulation_dtype(dtype),
            plans,
        )


class BuiltinCall(TileCall):
    """One call of an operation: see [Note: forward and backward]."""

    operation: MessageOperation

    def forward(self, *operands: Any) -> ForwardOutput:
        operation, source = self.operation, self.operation.source
        plan = operation.plans[self.needed]
        self.rereads, self.both_ways = plan.fetches, plan.fetches and plan.returns
        fetches_again = plan.fetches and not self.context.settings.disable_sr
        self.backward_communicates = self.distributed and (plan.returns or fetches_again)
        tiles = self.tiles(None if source is None else [operands[source]], local=LocalFields())
        stopped = self.run_waiting_work(operands) if self.distributed and waiting_work.value is not None else None
        # Allocated only after this worker's turn may have passed.
        reducer = REDUCERS[operation.reducer](self.relation, operation.dtype, operation.message.shape)
        for block, tile in tiles:
            values = operands
            if tile.rows is not None and source is not None:
                values = (*operands[:source], tile.rows[0], *operands[source + 1 :])
            reducer.aggregate(block, operation.message.with_values(values))
        result, edges = reducer.finish()
        saved: list[Tensor | None] = [*operands, edges]
        for i, is_read in enumerate(plan.reads):
            if not is_read:
                saved[i] = None
        if stopped is not None:
            raise stopped
        return ForwardOutput((result,), saved)

    def run_waiting_work(self, operands: Sequence[Tensor]) -> _StopRecomputationError | None:
        """Run the work of `meanwhile`. Return the end of a checkpoint's recomputation, which must wait for the call.

        The other workers also end there, but have sent the first messages.
        """
        work, waiting_work.value = waiting_work.value, None
        counts = [x._version for x in operands if not x.is_inference()]  # of changes in place
        try:
            if work is not None:
                work()
        except _StopRecomputationError as stopped:
            return stopped
        if counts != [x._version for x in operands if not x.is_inference()]:
            raise GraphError(
                "A layer changes its input in place while rows of it travel to other workers: a module such as "
                "fc_self or lin_r, or a hook of one. Let it work on a copy, as without inplace=True."
            )
        return None

    def backward(self, saved: list[Any], *grads: Tensor) -> list[Tensor | None]:
        operation, source, relation = self.operation, self.operation.source, self.relation
        plan, dtype = operation.plans[self.needed], operation.sum_dtype
        *values, edges = saved  # the operands that derivatives read, and the edges of maxima and minima
        grad, message = grads[0].contiguous(), operation.message
        half = self.dtypes[source] if source is not None and self.dtypes[source] in HALF_BITS else None
        if plan.returns and operation.reducer and half:  # to read half the bytes for each edge
            grad = grad.to(half)
        if operation.reducer == "mean" and message.op is Op.COPY:
            # Compute the backward of a sum of copies times 1 / in-degree, which needs no copy of the gradient. The
            # forward divides the sum instead, so that the mean of equal rows is exactly that row.
            weights = relation.degrees(dtype, 1 + len(message.lhs.shape), power=-1.0)
            message, values = EdgeMessage(Op.MUL, message.lhs, EdgeOperand.of(weights, Target.V)), [None, weights]
        elif operation.reducer == "mean":
            grad = grad.to(dtype) / relation.degrees(dtype, grad.dim())
        gradient = EdgeOperand(grad, Target.E if operation.reducer is None else Target.V, message.shape)
        # Workers of the same process add to gradients of sources in their turns; else the own block comes first.
        fresh = len(self.context.structure.group.local_peers) == 1
        rows = relation.num_src, relation.num_dst, relation.num_edges
        totals: list[Tensor | None] = [None] * len(values)
        for i in plan.needed:
            operand = message.operands[i]
            shape = rows[operand.target], *operand.shape
            if i == source:
                totals[i] = (torch.empty if fresh else torch.zeros)(shape, dtype=dtype, device=grad.device)
            else:
                totals[i] = torch.zeros(shape, dtype=dtype, device=grad.device)
        own, of_sources = (None, None) if source is None else (values[source], totals[source])
        tiles = self.tiles(
            None if own is None else [own],
            backward=True,
            local=LocalFields(),
            returns=None if of_sources is None else GradientReturn([of_sources], add_rows, half=half),
        )
        for block, tile in tiles:
            tile_values, tile_totals, is_own = [*values], [*totals], tile.halo is None
            if source is not None and not is_own:
                tile_values[source] = None if tile.rows is None else tile.rows[0]
                tile_totals[source] = None if tile.grads is None else tile.grads[0]
            operands = message.with_values(tile_values)
            for i in plan.needed:
                out, first = tile_totals[i], fresh and is_own and i == source
                if out is not None:
                    aggregate_grad(block, operands, SIDES[i], gradient, out, arg=edges, fresh=first)
            fresh = fresh and not is_own
        return totals[: len(self.needs)]
