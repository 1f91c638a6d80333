"""One-pass attention across workers: softmax over a node's in-edges, and the weighted sum of their sources' features.

[Note: one pass over shards]
A destination's in-edges are in all shards, so the softmax is computed incrementally: relative to the greatest score so
far, as in `sar.kernels.attention`. Only the sources' features travel. A reader computes their scores itself, unless it
reads them in place. The backward fetches the features again (or has kept them), computes each weight again from the
greatest score and the sum of exponentials of its destination, and returns one gradient.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from sar.comm.tiles import GradientReturn, LocalFields
from sar.core.collective import CallContext, ForwardOutput, Operation, TileCall, uncompiled, widest_rows
from sar.core.modules import as_autocast, is_exactly
from sar.errors import GraphError
from sar.kernels import accumulation_dtype, add_rows
from sar.kernels.attention import (
    add_score_grads,
    attend,
    attend_grad,
    destination_statistics,
    note_scores,
    project,
    project_grad,
)
from sar.kernels.ops import Attention, AttentionOperands, Gradients, OnlineSoftmaxState, Score
from sar.tensors.spillable import spills
from sar.tensors.views import HALF_BITS

SEED_STEP = 0xD1342543DE82EF95
"""Difference between the dropout seeds of workers, whose edge IDs overlap. It is not the generator's own increment,
which would drop the same edges on two workers, shifted by one."""


class Recompute(NamedTuple):
    """Recomputes x = function(*tensors) from tensors that autograd keeps anyway, such as a projection's input."""

    function: Callable[..., Tensor]
    tensors: tuple[Tensor | None, ...]


def recompute_linear(project: Any, source: Tensor, shape: tuple[int, int]) -> Recompute | None:
    """Recompute a projection of `source` to (N, *shape). None if it might differ from the result of `project`."""
    if as_autocast(source) is not source or not is_exactly(project, nn.Linear):
        return None
    inputs = source, project.weight, project.bias  # autocast, if enabled, converts the parameters as the source was
    return Recompute(lambda x, w, b: linear(x, w.to(x), None if b is None else b.to(x)).unflatten(1, shape), inputs)


class Inputs(NamedTuple):
    """Inputs of `attention`. y is None if it is x."""

    x: Tensor
    y: Tensor | None
    attn: Tensor | None
    attn_dst: Tensor | None
    edge_weight: Tensor | None


@uncompiled
def attention(
    context: CallContext,
    score: Score,
    x: Tensor,
    y: Tensor,
    *,
    attn: Tensor | None = None,
    attn_dst: Tensor | None = None,
    factor: float,
    dropout: float = 0.0,
    edge_weight: Tensor | None = None,
    recompute: Recompute | None = None,
) -> Tensor:
    """Sum the features of each node's sources, weighted by softmax(score) over its in-edges; a collective call.

    Args:
        score: formula of the scores of x and y; see `Score`.
        x: features of the sources, (N_src, H, D).
        y: features of the destinations, (N_dst, H, D); may be x itself.
        attn: (H, D) parameters of ADDITIVE (for sources) and DYNAMIC scores.
        attn_dst: (H, D) parameters of ADDITIVE scores for destinations.
        factor: slope of the leaky ReLU below 0, at least 0; for DOT, scale of the products.
        dropout: probability with which a weight is dropped; the seed comes from torch's default generator.
        edge_weight: (E,) factors of the softmax weights, after dropout. Default 1.
        recompute: computes x again in the backward, so that it need not stay in memory until then.

    Returns:
        (N_dst, H, D), 0 for nodes without in-edges; in the widest dtype of the operands.
    """
    relation = context.relation
    num_src, num_dst, num_edges = relation.num_src, relation.num_dst, relation.num_edges
    if x.dim() != 3 or y.dim() != 3 or len(x) != num_src or len(y) != num_dst or x.shape[1:] != y.shape[1:]:
        raise GraphError(
            f"Attention got features {tuple(x.shape)} of sources and {tuple(y.shape)} of destinations; "
            f"expected ({num_src}, heads, dim) and ({num_dst}, heads, dim)."
        )
    if edge_weight is not None and edge_weight.shape != (num_edges,):
        raise GraphError(f"Edge weights have shape {tuple(edge_weight.shape)}; expected ({num_edges},).")
    for parameters in (attn, attn_dst):
        if parameters is not None and parameters.shape != x.shape[1:]:
            raise GraphError(
                f"Attention got parameters {tuple(parameters.shape)} for features {tuple(x.shape)}; "
                f"expected {tuple(x.shape[1:])}."
            )
    seed = int(torch.randint(2**62, (), device="cpu")) + context.structure.group.rank * SEED_STEP if dropout else 0
    how = Attention(score, factor, dropout, seed % 2**64)
    heads, name = x.shape[1:], score.name.lower()
    text = f"attention, {name} scores: {x.dtype}, heads {tuple(heads)}, factor {factor}, dropout {dropout}"
    operation = context.operation((text,), lambda: Operation(context.signature(text), widest_rows([x])))
    if spills(x.device):
        recompute = None  # x leaves memory for a file anyway
    inputs = x, None if y is x else y, attn, attn_dst, edge_weight
    if recompute is None:
        return _AttentionCall(context, operation, how, None).apply(*inputs)[0]
    return _AttentionCall(context, operation, how, recompute.function).apply(*inputs, *recompute.tensors)[0]


class _AttentionCall(TileCall):
    """One call of `attention`: see [Note: one pass over shards]. Tensors of `Recompute` follow the inputs."""

    def __init__(
        self, context: CallContext, operation: Operation, how: Attention, recompute: Callable[..., Tensor] | None
    ) -> None:
        super().__init__(context, operation)
        self.how = how
        self.recompute = recompute

    def forward(self, *inputs: Any) -> ForwardOutput:
        wide, scores = self.widen(Inputs(*inputs[:5]))
        # Begin the exchange first, so that the first tiles travel while this worker's own nodes are computed.
        tiles = self.tiles([inputs[0]], local=LocalFields(scores))
        ends = _ends(wide, scores)
        running = OnlineSoftmaxState.start(self.relation.num_dst, ends.x)
        for block, tile in tiles:
            attend(block, self.how, ends if tile.rows is None else _with_rows(ends, tile.rows), running)
        out, normaliser = running.finish(self.relation.in_degrees)
        dtype = inputs[0].dtype
        for tensor in inputs[1:5]:
            dtype = dtype if tensor is None else torch.promote_types(dtype, tensor.dtype)
        kept = inputs if self.recompute is None else (None, *inputs[1:])
        return ForwardOutput((out.to(dtype),), [out, normaliser, *kept])

    def widen(self, inputs: Inputs) -> tuple[Inputs, list[Tensor]]:
        """The inputs for kernels; and the sources' share of ADDITIVE scores, (N_src, H), if they are these.

        All others but features in half precision are in the dtype of sums.
        """
        dtype = accumulation_dtype(inputs.x.dtype)
        wide = Inputs._make([None if x is None else x.detach().contiguous() for x in inputs])
        y = wide.y if wide.y is None or wide.y.dtype in HALF_BITS else wide.y.to(dtype)
        wide = Inputs(wide.x, y, *[None if x is None else x.to(dtype) for x in wide[2:]])
        if self.how.score is not Score.ADDITIVE or wide.attn is None:
            return wide, []
        return wide, [project(wide.x, wide.attn)]

    def backward(self, saved: list[Any], *grads: Tensor) -> list[Tensor | None]:
        out, normaliser = saved[:2]
        # Kernels read the gradient for each edge, as they read features: in the same dtype.
        grad = grads[0].to(self.dtypes[0]).contiguous()
        stats = destination_statistics(self.how, normaliser, grad, out)
        # Free the result, which is no longer needed, unless the graph is retained.
        del saved[:2], out, normaliser
        inputs, recompute_from = Inputs(*saved[:5]), saved[5:]
        if self.recompute is not None:
            inputs = inputs._replace(x=self.recompute(*recompute_from))
        wide, scores = self.widen(inputs)
        dtype = accumulation_dtype(wide.x.dtype)
        half = None if wide.x.dtype == dtype else wide.x.dtype
        totals = [torch.zeros_like(field, dtype=dtype) for field in (wide.x, *scores)]
        returns, local = GradientReturn(totals[:1], add_rows, half=half), LocalFields(scores, totals[1:])
        tiles = self.tiles([inputs.x], backward=True, local=local, returns=returns)
        ends = _ends(wide, scores)
        note_scores(self.how, stats, ends.y)
        ends_grad = totals[0]  # sources and destinations share a gradient if they are the same
        if inputs.attn_dst is not None or inputs.y is not None:
            ends_grad = torch.zeros_like(ends.y, dtype=dtype)
        attn_grad = None if ends.attn is None else torch.zeros_like(ends.attn)
        weight_grad = None if ends.weight is None else torch.zeros_like(ends.weight)
        sums = Gradients(totals[0], ends_grad, attn_grad, weight_grad, *totals[1:])
        for block, tile in tiles:
            operands, gradients = ends, sums
            if tile.rows is not None and tile.grads is not None:
                operands = _with_rows(ends, tile.rows)
                gradients = sums._replace(x=tile.grads[0], x_score=None if operands.x_score is None else tile.grads[1])
            attend_grad(block, self.how, operands, grad, stats, gradients)
        if scores:
            add_score_grads(ends, sums)
        y_grad, attn_dst_grad = None if wide.y is None else sums.y, None
        if wide.attn_dst is not None:
            features, features_grad = wide.x, sums.x
            if wide.y is not None:
                features, features_grad = wide.y, torch.zeros_like(wide.y, dtype=dtype)
                y_grad = features_grad
            attn_dst_grad = torch.zeros_like(wide.attn_dst)
            project_grad(features, wide.attn_dst, sums.y, features_grad, attn_dst_grad)
        return [sums.x, y_grad, sums.attn, attn_dst_grad, sums.weight, *[None] * len(recompute_from)]


def _with_rows(ends: AttentionOperands, rows: list[Tensor]) -> AttentionOperands:
    """The operands with other sources' rows, and with their scores if `rows` contains them."""
    return ends._replace(x=rows[0], x_score=rows[1] if rows[1:] else None)


def _ends(wide: Inputs, scores: list[Tensor]) -> AttentionOperands:
    """The operands of the kernels on this worker's own nodes."""
    y = wide.x if wide.y is None else wide.y
    y = y if wide.attn_dst is None else project(y, wide.attn_dst)
    return AttentionOperands(wide.x, y, wide.attn, wide.edge_weight, *scores)
