"""Against the direction of the edges: sums and maxima of edge values at their sources, on whatever worker these are."""

from typing import Any

import torch
from torch import Tensor

from sar.comm.exchange import GradientReturn, LocalFields
from sar.core.collective import Collective, Made
from sar.core.eager import uncompiled
from sar.core.graph.graph import GraphShardManager
from sar.core.passing.builtin import Aggregated, BuiltinMessages
from sar.core.passing.messages import COPY_SOURCE
from sar.outofcore.residency import roomy

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
    return _SumAtSources("sum", graph, values).apply(values)[0]


class _AtSources(Collective):
    """Values of edges travel as gradients of "copy the source's row to the edge" do."""

    def __init__(self, what: str, graph: GraphShardManager, values: Tensor) -> None:
        self.copies = BuiltinMessages(graph.passing().context, COPY_SOURCE, None, values)
        signature = f"{what} at sources; {self.copies.signature}"
        super().__init__(self.copies.context.group, signature, distributed=self.copies.distributed)


class _SumAtSources(_AtSources):
    """The backward of these copies, with them as its own backward."""

    def forward(self, *inputs: Any) -> Made:
        (values,) = inputs
        (out,) = self.copies.pull_back([None], Aggregated(values, None), values, SOURCES)
        assert out is not None
        return Made((out.to(values.dtype),))

    def backward(self, saved: list[Any], *grads: Tensor) -> list[Tensor | None]:
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
    return _MaxAtSources("maximum", graph, values).apply(values)[0]


class _MaxAtSources(_AtSources):
    def forward(self, *inputs: Any) -> Made:
        (values,) = inputs
        shape = self.copies.relation.num_src, *values.shape[1:]
        greatest = roomy(shape, values.dtype, values.device).fill_(-torch.inf)
        received = None
        if self.distributed:
            returns = GradientReturn([greatest], _keep_greater, start=-torch.inf)
            received = self.copies.exchange(0).exchange_tiles(values.device, local=LocalFields(), returns=returns)
        for piece in self.copies.context.pieces(received):
            total = greatest if piece.grads is None else piece.grads[0]
            ids = piece.block.ids(0, piece.block.num_edges)
            total.index_reduce_(0, piece.block.cols, values[ids], "amax")
        return Made((greatest,))

    def backward(self, saved: list[Any], *grads: Tensor) -> list[Tensor | None]:
        raise AssertionError("no gradient flows through a maximum at sources")


def _keep_greater(rows: Tensor, values: Tensor, total: Tensor) -> None:
    rows = rows.long()
    total.index_copy_(0, rows, torch.maximum(total.index_select(0, rows), values))
