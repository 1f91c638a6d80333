"""One relation's message passing: built-in or Python functions on either side, and what each combination runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sar.comm import session
from sar.comm.exchange import Settings
from sar.comm.plan import Tile
from sar.common_tuples import EID
from sar.core.eager import uncompiled
from sar.core.graph.frames import Frame
from sar.core.passing.batches import NodeBatch
from sar.core.passing.builtin import Call, check_operands, promoted, run
from sar.core.passing.mailbox import checked_results, reduce_mailboxes
from sar.core.passing.messages import Message, Operand, is_builtin, parse_message, parse_reduction
from sar.core.passing.python_messages import PythonCall
from sar.core.relation import Relation, Structure
from sar.errors import GraphError
from sar.kernels import EdgeBlock, Op, Target

COPY_SOURCE = Message(Op.COPY, Operand(Target.U, "values"), None, "values")


@dataclass(frozen=True)
class Passing:
    """A relation with its frames, as they are when a call is made."""

    structure: Structure
    relation: Relation
    src: Frame
    dst: Frame
    edge: Frame
    settings: Settings

    def update_all(self, message_func: Any, reduce_func: Any) -> dict[str, Tensor]:
        """New fields of the destinations, (N_dst, ...) each."""
        if not is_builtin(reduce_func):
            return reduce_mailboxes(self.relation, reduce_func, self.apply_edges(message_func), self.dst)
        if is_builtin(message_func):
            message = parse_message(message_func)
            reducer, out_field = parse_reduction(reduce_func, message.out_field)
            return {out_field: self._run_builtin(message, reducer)}
        reducer, out_field = parse_reduction(reduce_func, None)
        results = self._run_python(message_func, reducer, reduce_func.msg_field)
        return {out_field: results[reduce_func.msg_field]}

    def apply_edges(self, func: Any) -> dict[str, Tensor]:
        """New fields of the edges, (E, ...) each."""
        if is_builtin(func):
            message = parse_message(func)
            return {message.out_field: self._run_builtin(message, None)}
        return self._run_python(func, None, None)

    def _run_builtin(self, message: Message, reducer: str | None) -> Tensor:
        lhs = self._operand(message.lhs)
        rhs = self._operand(message.rhs) if message.rhs is not None else None
        if rhs is not None:
            lhs, rhs = promoted(lhs, rhs)
        return run(self.builtin_call(message, reducer, lhs, rhs), lhs, rhs)

    @uncompiled
    def copy_to_edges(self, values: Tensor) -> Tensor:
        """The row of each edge's source, (E, ...), of (N_src, ...) values."""
        return run(self.builtin_call(COPY_SOURCE, None, values), values, None)

    def builtin_call(self, message: Message, reducer: str | None, lhs: Tensor, rhs: Tensor | None = None) -> Call:
        """The call that computes `message` of such operands, and reduces it unless `reducer` is None."""
        check_operands(message, reducer, lhs, rhs)
        lhs_shape, rhs_shape = tuple(lhs.shape[1:]), tuple(rhs.shape[1:]) if rhs is not None else None
        what = f"update_all, {reducer}" if reducer else "apply_edges"
        words = self.describe(f"{what} of {message}: {lhs.dtype}, widths {lhs_shape} and {rhs_shape}")
        group, pool = self.structure.group, session.buffer_pool()
        return Call(group, pool, self.relation, message, reducer, self.settings, lhs_shape, rhs_shape, lhs.dtype, words)

    def _run_python(self, func: Any, reducer: str | None, reduced: str | None) -> dict[str, Tensor]:
        group, pool = self.structure.group, session.buffer_pool()
        call = PythonCall(group, pool, self.relation, self.settings, func, reducer, reduced, self._find_edges)
        return call.run(self.src, self.dst, self.edge, self.describe)

    def _operand(self, operand: Operand) -> Tensor:
        return {Target.U: self.src, Target.V: self.dst, Target.E: self.edge}[operand.target][operand.field]

    def describe(self, call: str) -> str:
        """A call in words that differ where workers do: along what, in which graph, with which settings."""
        return (
            f"{call}; along {self.relation.etype}, gradients {'on' if torch.is_grad_enabled() else 'off'}, "
            f"graph {self.structure.signature}, {self.settings}"
        )

    def _find_edges(self, block: EdgeBlock, tile: Tile | None) -> tuple[Tensor, Tensor, Tensor]:
        """Global IDs of the sources and destinations of a block's edges, and edge IDs."""
        source, _, destination = self.relation.etype
        cols = block.cols.long()
        if tile is None:
            src = self.structure.src.ids[source][cols]
        else:
            src = self.relation.halos[tile.peer][cols + tile.begin].long() + self.structure.node_ranges[tile.peer][0]
        ids = block.ids(0, block.num_edges)
        dst = self.structure.dst.ids[destination][block.destinations(0, block.num_edges)]
        return src, dst, self.edge[EID][ids]


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
