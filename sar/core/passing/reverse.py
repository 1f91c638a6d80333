"""Against the direction of the edges: sums and maxima of edge values at their sources, on whatever worker these are."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sar.comm.rows import RowFormat
from sar.core.eager import uncompiled
from sar.core.graph.graph import GraphShardManager
from sar.core.passing.builtin import LHS, Call, Saved, evaluate, pull_back
from sar.core.passing.message_passing import COPY_SOURCE


@uncompiled
def sum_at_sources(graph: GraphShardManager, values: Tensor) -> Tensor:
    """Sum the values of each node's out-edges into all workers: s_u = sum of x_e over edges e from u.

    It is what the backward of "copy the source's row to the edge" computes, and the other way round.

    Args:
        graph: a distributed graph with one edge type.
        values: (E, ...) floating point, in the visible edge order.

    Returns:
        (N_src, ...).

    Raises:
        CommunicationError: where another worker failed or makes another call.
    """
    call = graph.passing().builtin_call(COPY_SOURCE, None, values)
    anchor = torch.empty(0, requires_grad=torch.is_grad_enabled() and call.distributed)
    result: Tensor = _SumAtSources.apply(anchor, values, call)
    return result


class _SumAtSources(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, values: Tensor, call: Call) -> Tensor:
        ctx.call = call
        flags = LHS * ctx.needs_input_grad[1]
        with call.group.guard():
            if call.distributed:
                for theirs in call.group.agree(f"sum at sources; {call.words}", flags):
                    flags |= theirs
            saved = Saved({"lhs": True, "rhs": False}, {"lhs": None, "rhs": None}, None, {})
            out = pull_back(call, saved, values)["lhs"].to(call.dtype)
        if not flags:
            ctx.mark_non_differentiable(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        call: Call = ctx.call
        with call.group.guard():
            if call.distributed:
                call.group.agree(f"backward of sum at sources; {call.words}")
            return None, evaluate(call, grad.contiguous(), None, {})[0], None


@uncompiled
@torch.no_grad()
def max_at_sources(graph: GraphShardManager, values: Tensor) -> Tensor:
    """The greatest of the values of each node's out-edges into all workers, (N_src, ...); -inf where there is none.

    Args:
        graph: a distributed graph with one edge type.
        values: (E, ...) floating point, in the visible edge order. No gradient flows.

    Raises:
        CommunicationError: where another worker failed or makes another call.
    """
    call = graph.passing().builtin_call(COPY_SOURCE, None, values)
    relation = call.relation
    greatest = values.new_full((relation.num_src, *values.shape[1:]), -torch.inf)

    def deliver(rows: Tensor, incoming: list[Tensor]) -> None:
        rows = rows.long()
        greatest.index_copy_(0, rows, torch.maximum(greatest.index_select(0, rows), incoming[0]))

    with call.group.guard():
        if not call.distributed:
            for block in relation.blocks:
                greatest.index_reduce_(0, block.cols, values[block.ids(0, block.num_edges)], "amax")
            return greatest
        call.group.agree(f"maximum at sources; {call.words}")
        portions = call.exchange({}).sweep(values.device, grads=RowFormat.of([greatest]), deliver=deliver)
        own = call.own_block
        greatest.index_reduce_(0, own.cols, values[own.ids(0, own.num_edges)], "amax")
        for portion in portions:
            assert portion.grads is not None
            block = relation.tile(portion.tile)
            ids = block.ids(0, block.num_edges)
            portion.grads[0].fill_(-torch.inf).index_reduce_(0, block.cols, values[ids], "amax")
    return greatest
