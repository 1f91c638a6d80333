"""Softmax over the in-edges of each destination, or the out-edges of each source."""

from typing import Any

import torch
from torch import Tensor

from sar.core.collective import Collective, ForwardOutput
from sar.core.eager import uncompiled
from sar.core.graph.graph import GraphShardManager
from sar.core.graph.queries import ALL
from sar.core.passing.builtin import copy_to_edges
from sar.core.passing.message_passing import max_at_sources, sum_at_sources
from sar.errors import GraphError
from sar.kernels import EdgeBlock, edge_softmax_backward, edge_softmax_forward


@uncompiled
def edge_softmax(graph: GraphShardManager, logits: Tensor, eids: Any = ALL, norm_by: str = "dst") -> Tensor:
    """Normalise the logits of the edges that share a node: exp(x_e) / sum of exp(x_e') over edges e' at that node.

    By destination nothing is communicated, because a node's in-edges are all on its own worker. By source it is a
    collective call.

    Args:
        graph: a distributed graph with one edge type.
        logits: (E, *) floating point, in the visible edge order; with `eids`, a row for each of those.
        eids: local edge IDs to which the softmax is confined, (K,) integer; default all.
        norm_by: `dst` (default) or `src`.

    Returns:
        (E, *) or (K, *), like `logits`.

    Raises:
        GraphError: for logits of another length, several edge types, or another `norm_by`.
    """
    if norm_by not in ("dst", "src"):
        raise GraphError(f"edge_softmax got norm_by={norm_by!r}; expected 'dst' or 'src'.")
    num_edges = graph.num_edges()
    chosen = None if isinstance(eids, str) and eids == ALL else torch.as_tensor(eids, device=logits.device).long()
    if chosen is not None and bool(((chosen < 0) | (chosen >= num_edges)).any()):
        raise GraphError(f"eids are from {int(chosen.min())} to {int(chosen.max())}; expected 0 to {num_edges - 1}.")
    rows = num_edges if chosen is None else len(chosen)
    if logits.dim() == 0 or len(logits) != rows:
        raise GraphError(f"The logits have shape {tuple(logits.shape)}; expected {rows} rows, one for each edge.")
    if not logits.dtype.is_floating_point:
        raise GraphError(f"The logits are {logits.dtype}; expected floating point.")
    normalise = _by_destination if norm_by == "dst" else _by_source
    if chosen is None:
        return normalise(graph, logits)
    # Edges that are left out weigh exp(-inf) = 0.
    spread = logits.new_full((num_edges, *logits.shape[1:]), -torch.inf).index_copy(0, chosen, logits)
    return normalise(graph, spread)[chosen]


def _by_destination(graph: GraphShardManager, logits: Tensor) -> Tensor:
    return _EdgeSoftmax(graph.call_context().relation.blocks).apply(logits)[0]


def _by_source(graph: GraphShardManager, logits: Tensor) -> Tensor:
    context = graph.call_context()
    greatest = max_at_sources(context, logits)
    greatest = greatest.masked_fill(greatest == -torch.inf, 0)
    weights = (logits - copy_to_edges(context, greatest)).exp()
    return weights / copy_to_edges(context, sum_at_sources(context, weights))


class _EdgeSoftmax(Collective):
    """An operation of this worker alone."""

    def __init__(self, blocks: list[EdgeBlock]) -> None:
        super().__init__(None, "edge_softmax")
        self.blocks = blocks

    def forward(self, *inputs: Any) -> ForwardOutput:
        out = edge_softmax_forward(self.blocks, inputs[0])
        return ForwardOutput((out,), [out])

    def backward(self, saved: list[Any], *grads: Tensor) -> list[Tensor | None]:
        return [edge_softmax_backward(self.blocks, saved[0], grads[0])]
