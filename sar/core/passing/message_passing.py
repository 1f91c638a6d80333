"""Message passing along one relation, and against it.

Along the edges, `send_and_reduce` combines built-in or Python message and reduce functions. Against them, this computes
sums and maxima of edge values at their sources, which may be on any worker.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sar.comm.tiles import GradientReturn, LocalFields
from sar.core.collective import CallContext, ForwardOutput
from sar.core.eager import uncompiled
from sar.core.overlap import Steps
from sar.core.passing.batches import EdgeFields, reduce_mailboxes
from sar.core.passing.builtin import (
    COPY_SOURCE,
    BuiltinCall,
    Message,
    Operation,
    aggregate,
    is_python,
    parse_message,
    parse_reduction,
)
from sar.core.passing.python_messages import run_python
from sar.core.passing.reductions import UNFILLED
from sar.errors import GraphError
from sar.kernels import Target
from sar.spillable import empty_spillable


def send_and_reduce(
    context: CallContext, fields: EdgeFields, message_func: Any, reduce_func: Any, *, fill: bool = True
) -> dict[str, Tensor]:
    """Compute new fields of the destinations, (N_dst, ...) each: `update_all` along one relation.

    Without `fill`, results are those that DGL combines across relations: maxima and minima without messages are
    infinite if the relation has any edge, and a Python reduce function is not called if it has none.
    """
    if is_python(reduce_func):
        if not fill and not context.relation.num_edges_global:
            return {}
        messages = compute_on_edges(context, fields, message_func)
        return reduce_mailboxes(
            context.relation, reduce_func, messages, fields.dst, context.structure.group.world_size > 1
        )
    message = None if is_python(message_func) else parse_message(message_func)
    reducer, out_field = parse_reduction(reduce_func, message.out_field if message else None)
    if reducer in ("max", "min") and not fill and context.relation.num_edges_global:
        reducer = UNFILLED + reducer
    if message is not None:
        return {out_field: aggregate(context, message, reducer, *_operands(message, fields))}
    results = run_python(context, message_func, fields, reducer, reduce_func.msg_field)
    return {out_field: results[reduce_func.msg_field]}


def fill_infinities(column: Tensor, reduce_func: Any) -> Tensor:
    """The column with infinities replaced by 0 if the reducer is the built-in max or min; otherwise unchanged."""
    extreme = not is_python(reduce_func) and reduce_func.name in ("max", "min")
    return column.masked_fill(column.isinf(), 0) if extreme else column


def compute_on_edges(context: CallContext, fields: EdgeFields, function: Any) -> dict[str, Tensor]:
    """Compute new fields of the edges, (E, ...) each: `apply_edges` along one relation."""
    if is_python(function):
        return run_python(context, function, fields, None, None)
    message = parse_message(function)
    return {message.out_field: aggregate(context, message, None, *_operands(message, fields))}


def _operands(message: Message, fields: EdgeFields) -> tuple[Tensor, ...]:
    frames = {Target.U: fields.src, Target.V: fields.dst, Target.E: fields.edge}
    lhs = frames[message.lhs.target][message.lhs.field]
    return (lhs,) if message.rhs is None else (lhs, frames[message.rhs.target][message.rhs.field])


CROSS_REDUCERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "mean": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.max(0).values,
    "min": lambda stacked: stacked.min(0).values,
    "stack": lambda stacked: stacked.transpose(0, 1),
}


def reduce_across(results: list[dict[str, Tensor]], cross_reducer: Any) -> dict[str, Tensor]:
    """Combine the results of several relations for one node type, field by field.

    As in DGL, the results of a single relation do not change. The cross reducer is sum, mean, max, min, stack (to
    (N, relations, ...)), or a function of a list of tensors.
    """
    if isinstance(cross_reducer, str) and cross_reducer not in CROSS_REDUCERS:
        raise GraphError(
            f"Unknown cross reducer {cross_reducer!r}; expected {', '.join(CROSS_REDUCERS)}, or a function."
        )
    if len(results) == 1 and cross_reducer != "stack":
        return results[0]
    combined = {}
    for name in dict.fromkeys(name for result in results for name in result):
        values = [result[name] for result in results if name in result]
        if callable(cross_reducer):
            combined[name] = cross_reducer(values)
        else:
            combined[name] = CROSS_REDUCERS[cross_reducer](torch.stack(values))
    return combined


@uncompiled
def sum_at_sources(context: CallContext, values: Tensor) -> Tensor:
    """Sum the values of each node's out-edges into all workers: s_u = sum of x_e over edges e from u.

    A collective call. The values are (E, ...) floating point, in the visible edge order; the sums are (N_src, ...).
    """
    return _AtSources("sum", context, values).apply(values)[0]


@uncompiled
@torch.no_grad()
def max_at_sources(context: CallContext, values: Tensor) -> Tensor:
    """The greatest value of each node's out-edges into all workers, (N_src, ...); -inf for nodes without any.

    A collective call without gradients. `sum_at_sources` describes the values.
    """
    return _AtSources("maximum", context, values).apply(values)[0]


class _AtSources(BuiltinCall):
    """Sends edge values to their sources, as the backward of a copy from sources to edges does.

    The backward of a sum is that copy.
    """

    def __init__(self, what: str, context: CallContext, values: Tensor) -> None:
        super().__init__(context, Operation.of(context, COPY_SOURCE, None, [values]))
        self.is_sum = what == "sum"
        self.signature = f"{what} at sources; {self.signature}"

    def forward_steps(self, *operands: Any) -> Steps:
        (values,) = operands
        if self.is_sum:
            (out,) = yield from self.gradients(self.message, [None], values.to(self.operation.sum_dtype), needed=1)
            return ForwardOutput((out.to(values.dtype),))
        shape = self.relation.num_src, *values.shape[1:]
        greatest = empty_spillable(shape, values.dtype, values.device).fill_(-torch.inf)
        returns = GradientReturn(
            [greatest],
            lambda rows, values, total: total.index_copy_(0, rows.long(), total[rows.long()].maximum(values)),
            start=-torch.inf,
        )
        for block, tile in self.tiles(local=LocalFields(), returns=returns):
            total = greatest if tile.grads is None else tile.grads[0]
            total.index_reduce_(0, block.cols, values[block.ids(0, block.num_edges)], "amax")
        return ForwardOutput((greatest,))

    def backward_steps(self, saved: list[Any], *grads: Tensor) -> Steps:
        output = yield from super().forward_steps(grads[0].contiguous())
        return [output.results[0]]
