"""GATConv and GATv2Conv of PyTorch Geometric in one pass over the edges, without tensors of their number.

[Note: attention in one pass]
These layers compute a weight for each edge (`edge_updater`), and pass it to `propagate`. Where the weights serve
nothing else, `edge_updater` makes none but a `OnePass`, which `propagate` recognises: the scores are then made and used
tile by tile. All else that the layers do, they do as they are written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import Tensor
from torch_geometric.nn import GATConv, GATv2Conv

from sar.adapters.pyg.edge_index import DistributedEdgeIndex
from sar.core.passing.attention import attention
from sar.kernels.attention_operands import Score


@dataclass(frozen=True)
class OnePass:
    """In the place of the weights of edges: what they are made of.

    conv: the layer.
    """

    conv: Any

    def attend(self, edges: DistributedEdgeIndex, x: tuple[Tensor, Tensor]) -> Tensor:
        """The sums of the sources' features, (N_src, H, C), by their weights: (N_dst, H, C)."""
        conv, (source, destination) = self.conv, x
        graph, _ = edges.passes
        additive = isinstance(conv, GATConv)
        return attention(
            graph.passing(),
            Score.ADDITIVE if additive else Score.DYNAMIC,
            source,
            destination,
            attn=conv.att_src[0] if additive else conv.att[0],
            attn_dst=conv.att_dst[0] if additive else None,
            factor=conv.negative_slope,
            dropout=conv.dropout if conv.training else 0.0,
        )


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def forward(conv: Any, x: Any, edge_index: Any, edge_attr: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        ends = x if isinstance(x, tuple | list) else (x,)
        served = (
            isinstance(edge_index, DistributedEdgeIndex)
            and edge_attr is None
            and not args
            and kwargs.get("return_attention_weights") is None
            and all(isinstance(end, Tensor) for end in ends)
            and conv.negative_slope >= 0
        )
        conv.__dict__["_in_one_pass"] = served
        try:
            return original(conv, x, edge_index, edge_attr, *args, **kwargs)
        finally:
            del conv.__dict__["_in_one_pass"]

    return forward


def _edge_updater(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def edge_updater(conv: Any, *args: Any, **kwargs: Any) -> Any:
        return OnePass(conv) if conv.__dict__.get("_in_one_pass") else original(conv, *args, **kwargs)

    edge_updater.one_pass = True  # type: ignore[attr-defined]
    return edge_updater


def install() -> None:
    """Replace what the layers call."""
    for kind in (GATConv, GATv2Conv):
        kind.forward = _forward(kind.forward)
        wrap(kind)


def wrap(kind: type) -> None:
    """Let a class that has an `edge_updater` of its own, or has been given one, go in one pass."""
    function = vars(kind).get("edge_updater")
    if issubclass(kind, GATConv | GATv2Conv) and function is not None and not getattr(function, "one_pass", False):
        kind.edge_updater = _edge_updater(function)  # type: ignore[attr-defined]
