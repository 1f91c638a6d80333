"""One relation's message passing: built-in or Python functions on either side, and what each combination runs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sar.core.collective import CallContext
from sar.core.passing.batches import EdgeFields, reduce_mailboxes
from sar.core.passing.builtin import Message, Operand, aggregate, is_python, parse_message, parse_reduction
from sar.core.passing.python_messages import run_python
from sar.errors import GraphError
from sar.kernels import Target


def send_and_reduce(context: CallContext, fields: EdgeFields, message_func: Any, reduce_func: Any) -> dict[str, Tensor]:
    """New fields of the destinations, (N_dst, ...) each: `update_all` along one relation."""
    if is_python(reduce_func):
        messages = compute_on_edges(context, fields, message_func)
        return reduce_mailboxes(context.relation, reduce_func, messages, fields.dst)
    if is_python(message_func):
        reducer, out_field = parse_reduction(reduce_func, None)
        made = run_python(context, message_func, fields, reducer, reduce_func.msg_field)
        return {out_field: made[reduce_func.msg_field]}
    message = parse_message(message_func)
    reducer, out_field = parse_reduction(reduce_func, message.out_field)
    return {out_field: aggregate(context, message, reducer, *_operands(message, fields))}


def compute_on_edges(context: CallContext, fields: EdgeFields, function: Any) -> dict[str, Tensor]:
    """New fields of the edges, (E, ...) each: `apply_edges` along one relation."""
    if is_python(function):
        return run_python(context, function, fields, None, None)
    message = parse_message(function)
    return {message.out_field: aggregate(context, message, None, *_operands(message, fields))}


def _operands(message: Message, fields: EdgeFields) -> list[Tensor]:
    def column(operand: Operand) -> Tensor:
        return {Target.U: fields.src, Target.V: fields.dst, Target.E: fields.edge}[operand.target][operand.field]

    return [column(operand) for operand in (message.lhs, message.rhs) if operand is not None]


CROSS_REDUCERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "mean": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.max(0).values,
    "min": lambda stacked: stacked.min(0).values,
    "stack": lambda stacked: stacked.transpose(0, 1),
}


def reduce_across(results: list[dict[str, Tensor]], cross_reducer: Any) -> dict[str, Tensor]:
    """Combine what several relations made for one node type, field by field.

    Args:
        results: (N, ...) by field, one dictionary for each relation, in the order of edge types.
        cross_reducer: sum, mean, max, min, stack (to (N, relations, ...)), or a function of a list of tensors.

    Raises:
        GraphError: for another reducer.
    """
    if isinstance(cross_reducer, str) and cross_reducer not in CROSS_REDUCERS:
        raise GraphError(
            f"Unknown cross reducer {cross_reducer!r}; expected {', '.join(CROSS_REDUCERS)}, or a function."
        )
    combined = {}
    for name in dict.fromkeys(name for result in results for name in result):
        values = [result[name] for result in results if name in result]
        if callable(cross_reducer):
            combined[name] = cross_reducer(values)
        else:
            combined[name] = CROSS_REDUCERS[cross_reducer](torch.stack(values))
    return combined
