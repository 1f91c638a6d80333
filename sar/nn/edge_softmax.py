"""Softmax over the in-edges of each destination."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sar.core.graph import GraphShardManager
from sar.core.queries import ALL
from sar.errors import GraphError
from sar.kernels import EdgeBlock, edge_softmax_backward, edge_softmax_forward


def edge_softmax(graph: GraphShardManager, logits: Tensor, eids: Any = ALL, norm_by: str = "dst") -> Tensor:
    """Normalise the logits of each destination's in-edges: exp(x_e) / sum of exp(x_e') over edges e' into dst(e).

    A destination's in-edges are all on its own worker, so nothing is communicated.

    Args:
        graph: a distributed graph with one edge type.
        logits: (E, *) floating point, in the visible edge order; with `eids`, a row for each of those.
        eids: local edge IDs to which the softmax is confined, (K,) integer; default all.
        norm_by: `dst`. (`src` is not supported so far.)

    Returns:
        (E, *) or (K, *), like `logits`.

    Raises:
        GraphError: for logits of another length or several edge types.
    """
    if norm_by != "dst":
        raise GraphError(f"edge_softmax with norm_by={norm_by!r} is not supported so far; expected 'dst'.")
    relation = graph._relation(None)
    chosen = None if isinstance(eids, str) and eids == ALL else torch.as_tensor(eids, device=logits.device).long()
    rows = relation.num_edges if chosen is None else len(chosen)
    if logits.dim() == 0 or len(logits) != rows:
        raise GraphError(f"The logits have shape {tuple(logits.shape)}; expected {rows} rows, one for each edge.")
    if not logits.dtype.is_floating_point:
        raise GraphError(f"The logits are {logits.dtype}; expected floating point.")
    if chosen is None:
        return _softmax(logits, relation.blocks)
    # Edges that are left out weigh exp(-inf) = 0.
    spread = logits.new_full((relation.num_edges, *logits.shape[1:]), -torch.inf).index_copy(0, chosen, logits)
    return _softmax(spread, relation.blocks)[chosen]


def _softmax(logits: Tensor, blocks: list[EdgeBlock]) -> Tensor:
    result: Tensor = _EdgeSoftmax.apply(logits, blocks)
    return result


class _EdgeSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, blocks: list[EdgeBlock]) -> Tensor:
        out = edge_softmax_forward(blocks, logits)
        ctx.blocks = blocks
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        return edge_softmax_backward(ctx.blocks, out, grad), None
