"""Against the direction of the edges: sums and maxima of edge values at their sources, on whatever worker these are."""

import torch
from torch import Tensor

from sar.comm.exchange import GradientReturn
from sar.core.collective import Collective, Made
from sar.core.eager import uncompiled
from sar.core.graph.graph import GraphShardManager
from sar.core.passing.builtin import Aggregated, BuiltinMessages
from sar.core.passing.messages import COPY_SOURCE

SOURCES = 1
"""Bit of the only operand of "copy the source's row to the edge"."""


@uncompiled
def sum_at_sources(graph: GraphShardManager, values: Tensor) -> Tensor:
    """Sum the values of each node's out-edges into all workers: s_u = sum of x_e over edges e from u.

    Args:
        graph: a distributed graph with one edge type.
        values: (E, ...) floating point, in the visible edge order.

    Returns:
        (N_src, ...).

    Raises:
        CommunicationError: where another worker failed or makes another call.
    """
    copies = BuiltinMessages(graph.passing().context, COPY_SOURCE, None, values)
    result: Tensor = _SumAtSources(copies).apply(values)
    return result


class _SumAtSources(Collective):
    """The backward of "copy the source's row to the edge", with that as its own backward."""

    def __init__(self, copies: BuiltinMessages) -> None:
        signature = f"sum at sources; {copies.signature}"
        super().__init__(copies.context.group, signature, distributed=copies.distributed)
        self.copies = copies

    def forward(self, *inputs: Tensor | None) -> Made:
        (values,) = inputs
        assert values is not None
        (out,) = self.copies.pull_back([None], Aggregated(values, None), values, SOURCES)
        assert out is not None
        return Made((out.to(values.dtype),))

    def backward(self, saved: list[Tensor | None], *grads: Tensor) -> list[Tensor | None]:
        return [self.copies.aggregate([grads[0].contiguous()], 0).out]


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
    copies = BuiltinMessages(graph.passing().context, COPY_SOURCE, None, values)
    result: Tensor = _MaxAtSources(copies).apply(values)
    return result


class _MaxAtSources(Collective):
    def __init__(self, copies: BuiltinMessages) -> None:
        signature = f"maximum at sources; {copies.signature}"
        super().__init__(copies.context.group, signature, distributed=copies.distributed)
        self.copies = copies

    def forward(self, *inputs: Tensor | None) -> Made:
        (values,) = inputs
        assert values is not None
        relation = self.copies.relation
        greatest = values.new_full((relation.num_src, *values.shape[1:]), -torch.inf)
        if not self.distributed:
            for block in relation.blocks:
                greatest.index_reduce_(0, block.cols, values[block.ids(0, block.num_edges)], "amax")
            return Made((greatest,))
        received = self.copies.exchange(0).sweep(values.device, returns=GradientReturn([greatest], _keep_greater))
        own = self.copies.context.own_block
        greatest.index_reduce_(0, own.cols, values[own.ids(0, own.num_edges)], "amax")
        for tile, _, grads in received:
            assert grads is not None
            block = relation.tile(tile)
            ids = block.ids(0, block.num_edges)
            grads[0].fill_(-torch.inf).index_reduce_(0, block.cols, values[ids], "amax")
        return Made((greatest,))

    def backward(self, saved: list[Tensor | None], *grads: Tensor) -> list[Tensor | None]:
        raise AssertionError("no gradient flows through a maximum at sources")


def _keep_greater(rows: Tensor, values: Tensor, total: Tensor) -> None:
    rows = rows.long()
    total.index_copy_(0, rows, torch.maximum(total.index_select(0, rows), values))
