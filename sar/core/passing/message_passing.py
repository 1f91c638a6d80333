"""One relation's message passing: built-in or Python functions on either side, and what each combination runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sar.comm.halo_plan import HaloSlice
from sar.common_tuples import EID
from sar.core.collective import CallContext
from sar.core.eager import uncompiled
from sar.core.graph.frames import Frame
from sar.core.passing.batches import NodeBatch, checked_results
from sar.core.passing.builtin import BuiltinMessages, promoted, run
from sar.core.passing.mailbox import reduce_mailboxes
from sar.core.passing.messages import COPY_SOURCE, Message, Operand, is_python, parse_message, parse_reduction
from sar.core.passing.python_messages import run_python
from sar.core.passing.recording import EdgeFields, FindEdges, PythonMessages
from sar.errors import GraphError
from sar.kernels import EdgeBlock, Target


@dataclass(frozen=True)
class Passing:
    """A relation with its frames, as they are when a call is made."""

    context: CallContext
    src: Frame
    dst: Frame
    edge: Frame

    def update_all(self, message_func: Any, reduce_func: Any) -> dict[str, Tensor]:
        """New fields of the destinations, (N_dst, ...) each."""
        if is_python(reduce_func):
            return reduce_mailboxes(self.context.relation, reduce_func, self.apply_edges(message_func), self.dst)
        if is_python(message_func):
            reducer, out_field = parse_reduction(reduce_func, None)
            results = self._run_python(message_func, reducer, reduce_func.msg_field)
            return {out_field: results[reduce_func.msg_field]}
        message = parse_message(message_func)
        reducer, out_field = parse_reduction(reduce_func, message.out_field)
        return {out_field: self._run_builtin(message, reducer)}

    def apply_edges(self, func: Any) -> dict[str, Tensor]:
        """New fields of the edges, (E, ...) each."""
        if is_python(func):
            return self._run_python(func, None, None)
        message = parse_message(func)
        return {message.out_field: self._run_builtin(message, None)}

    def _run_builtin(self, message: Message, reducer: str | None) -> Tensor:
        lhs = self._operand(message.lhs)
        rhs = self._operand(message.rhs) if message.rhs is not None else None
        if rhs is not None:
            lhs, rhs = promoted(lhs, rhs)
        return run(BuiltinMessages(self.context, message, reducer, lhs, rhs), lhs, rhs)

    @uncompiled
    def copy_to_edges(self, values: Tensor) -> Tensor:
        """The row of each edge's source, (E, ...), of (N_src, ...) values."""
        return run(BuiltinMessages(self.context, COPY_SOURCE, None, values), values)

    def _run_python(self, func: Any, reducer: str | None, reduced: str | None) -> dict[str, Tensor]:
        fields = EdgeFields(self.src, self.dst, self.edge)
        return run_python(self.context, PythonMessages(func, self.find_edges()), fields, reducer, reduced)

    def _operand(self, operand: Operand) -> Tensor:
        return {Target.U: self.src, Target.V: self.dst, Target.E: self.edge}[operand.target][operand.field]

    def find_edges(self) -> FindEdges:
        """What finds the ends and IDs of a block's edges, now and in the backward.

        It does not hold the frames: they may come to hold results of the call, whose autograd node would hold itself.
        """
        kept = {name: column for name, column in self.edge.items() if name == EID}
        return partial(_find_edges, self.context, Frame(self.edge.rows, self.edge.device, self.edge.what, kept))


def _find_edges(
    context: CallContext, edge: Frame, block: EdgeBlock, tile: HaloSlice | None
) -> tuple[Tensor, Tensor, Tensor]:
    structure, relation = context.structure, context.relation
    source, _, destination = relation.etype
    cols = block.cols.long()
    if tile is None:
        src = structure.src.ids[source][cols]
    else:
        src = relation.halos[tile.owner][cols + tile.begin].long() + structure.node_ranges[tile.owner][0]
    ids = block.ids(0, block.num_edges)
    dst = structure.dst.ids[destination][block.destinations(0, block.num_edges)]
    return src, dst, edge[EID][ids]


def apply_nodes(
    function: Callable[[NodeBatch], Mapping[str, Tensor]], new: Mapping[str, Tensor], frame: Frame, ntype: str
) -> dict[str, Tensor]:
    """What `function` makes of all nodes of a frame, `new` fields included, (N, ...) each."""
    nodes = torch.arange(frame.rows, device=frame.device)
    made = function(NodeBatch(nodes, {**frame, **new}, None, ntype))
    return {**new, **checked_results(function, made, frame.rows)}


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
