"""Sums and maxima of edge values at their sources, which may be on any worker: message passing against the edges."""

from typing import Any

import torch
from torch import Tensor

from sar.comm.tiles import GradientReturn, LocalFields
from sar.core.collective import CallContext, ForwardOutput, Operation, TileCall, uncompiled, widest_rows
from sar.core.passing.reducers import Collect
from sar.kernels import EdgeMessage, EdgeOperand, Op, Target, accumulation_dtype, add_rows, aggregate_grad


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


class _AtSources(TileCall):
    """Sends edge values to their sources, as the backward of a copy to the edges does; the backward is that copy."""

    def __init__(self, what: str, context: CallContext, values: Tensor) -> None:
        shape = tuple(values.shape[1:])
        text = f"{what} at sources of {values.dtype}, width {shape}"
        super().__init__(
            context, context.operation((text,), lambda: Operation(context.signature(text), widest_rows([values])))
        )
        self.is_sum, self.rereads, self.both_ways = what == "sum", False, False
        self.copies = EdgeMessage(Op.COPY, EdgeOperand(None, Target.U, shape))

    def forward(self, *inputs: Any) -> ForwardOutput:
        (values,) = inputs
        dtype = accumulation_dtype(values.dtype) if self.is_sum else values.dtype
        shape, start = (self.relation.num_src, *values.shape[1:]), 0.0 if self.is_sum else -torch.inf
        total = torch.full(shape, start, dtype=dtype, device=values.device)
        returns = GradientReturn([total], add_rows)
        if not self.is_sum:
            returns = GradientReturn(
                [total], lambda rows, new, out: out.index_copy_(0, rows.long(), out[rows.long()].maximum(new)), start
            )
        gradient = EdgeOperand.of(values.to(dtype), Target.E)
        for block, tile in self.tiles(local=LocalFields(), returns=returns):
            out = total if tile.grads is None else tile.grads[0]
            if self.is_sum:
                aggregate_grad(block, self.copies, "lhs", gradient, out)
            else:
                out.index_reduce_(0, block.cols, values[block.ids(0, block.num_edges)], "amax")
        return ForwardOutput((total.to(values.dtype),))

    def backward(self, saved: list[Any], *grads: Tensor) -> list[Tensor | None]:
        of_sums = grads[0].contiguous()
        reducer = Collect(self.relation, of_sums.dtype, tuple(of_sums.shape[1:]))
        for block, tile in self.tiles([of_sums], backward=True, local=LocalFields()):
            rows = of_sums if tile.rows is None else tile.rows[0]
            reducer.aggregate(block, self.copies.with_values([rows]))
        return [reducer.finish()[0]]
