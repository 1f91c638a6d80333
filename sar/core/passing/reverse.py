"""Against the direction of the edges: sums and maxima of edge values at their sources, on whatever worker these are."""

from typing import Any

import torch
from torch import Tensor

from sar.comm.exchange import GradientReturn, LocalFields
from sar.core.collective import ForwardOutput
from sar.core.eager import uncompiled
from sar.core.graph.graph import GraphShardManager
from sar.core.passing.builtin import COPY_SOURCE, BuiltinCall
from sar.raw_memory import empty_spillable

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


class _AtSources(BuiltinCall):
    """Values of edges travel as gradients of "copy the source's row to the edge" do."""

    def __init__(self, what: str, graph: GraphShardManager, values: Tensor) -> None:
        super().__init__(graph.call_context(), COPY_SOURCE, None, [values])
        self.signature = f"{what} at sources; {self.signature}"


class _SumAtSources(_AtSources):
    """The backward of these copies, with them as its own backward."""

    def forward(self, *operands: Any) -> ForwardOutput:
        (values,) = operands
        (out,) = self.gradients(self.message, [None], values.to(self.sum_dtype), SOURCES)
        assert out is not None
        return ForwardOutput((out.to(values.dtype),))

    def backward(self, saved: list[Any], *grads: Tensor) -> list[Tensor | None]:
        return [super().forward(grads[0].contiguous()).results[0]]


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
    def forward(self, *operands: Any) -> ForwardOutput:
        (values,) = operands
        shape = self.relation.num_src, *values.shape[1:]
        greatest = empty_spillable(shape, values.dtype, values.device).fill_(-torch.inf)
        received = None
        if self.distributed:
            returns = GradientReturn([greatest], _keep_greater, start=-torch.inf)
            received = self.exchange().exchange_tiles(values.device, local=LocalFields(), returns=returns)
        for block, tile in self.context.tiles(received):
            total = greatest if tile.grads is None else tile.grads[0]
            total.index_reduce_(0, block.cols, values[block.ids(0, block.num_edges)], "amax")
        return ForwardOutput((greatest,))

    def backward(self, saved: list[Any], *grads: Tensor) -> list[Tensor | None]:
        raise AssertionError("no gradient flows through a maximum at sources")


def _keep_greater(rows: Tensor, values: Tensor, total: Tensor) -> None:
    rows = rows.long()
    total.index_copy_(0, rows, torch.maximum(total.index_select(0, rows), values))
