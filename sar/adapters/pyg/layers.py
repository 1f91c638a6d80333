"""Layers of PyTorch Geometric whose `forward` cannot be right across workers as it is written: replaced, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from torch_geometric.nn import conv

from sar.adapters.pyg.edge_index import DistributedEdgeIndex
from sar.errors import GraphError

REFUSED: dict[str, str] = {
    "GPSConv": "attends between all pairs of nodes of the graph",
    "HypergraphConv": "reads its incidence matrix from both sides",
    "MeshCNNConv": "reads neighbours by their position in edge_index",
    "WLConv": "numbers colours in the order in which it meets them; WLConvContinuous does not",
}
"""Layers that raise on a distributed edge index, and why."""


def _refusing(layer: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, DistributedEdgeIndex) for value in (*args, *kwargs.values())):
            raise GraphError(f"{layer} {REFUSED[layer]}, so it cannot run on a distributed edge_index.")
        return original(self, *args, **kwargs)

    return forward


def _both_ways(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """DirGNNConv on the edges and on their reverse, which lie on other workers."""

    @wraps(original)
    def forward(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
        if not isinstance(edge_index, DistributedEdgeIndex):
            return original(self, x, edge_index)
        inwards = self.conv_in(x, edge_index)
        outwards = self.conv_out(x, edge_index.reversed)
        out: Tensor = self.alpha * outwards + (1 - self.alpha) * inwards
        return out + self.lin(x) if self.root_weight else out

    return forward


def install() -> None:
    """Replace the forwards."""
    for name in REFUSED:
        kind = getattr(conv, name)
        kind.forward = _refusing(name, kind.forward)
    conv.DirGNNConv.forward = _both_ways(conv.DirGNNConv.forward)
