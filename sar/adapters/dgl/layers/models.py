"""GraphSAGE and GAT, made of DGL's own layers and nothing else: the same on DGL's graph as on ours."""

import itertools
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from sar.adapters.dgl.shim import require_dgl


class GraphSAGE(nn.Module):
    """Mean aggregation in each layer (Hamilton et al., 2017), without dropout."""

    def __init__(self, num_features: int, num_classes: int, hidden: int = 64, num_layers: int = 3):
        require_dgl()
        from dgl.nn import SAGEConv

        super().__init__()
        widths = [num_features, *[hidden] * (num_layers - 1), num_classes]
        self.layers = nn.ModuleList(
            SAGEConv(width, next_width, "mean") for width, next_width in itertools.pairwise(widths)
        )

    def forward(self, graph: Any, x: Tensor) -> Tensor:  # x: (N, F) -> (N, C)
        for layer in self.layers[:-1]:
            x = functional.relu(layer(graph, x))
        logits: Tensor = self.layers[-1](graph, x)
        return logits


class GAT(nn.Module):
    """Two attention layers (Velickovic et al., 2018), without dropout."""

    def __init__(self, num_features: int, num_classes: int, hidden: int = 16, num_heads: int = 4):
        require_dgl()
        from dgl.nn import GATConv

        super().__init__()
        self.first = GATConv(num_features, hidden, num_heads)
        self.last = GATConv(num_heads * hidden, num_classes, 1)

    def forward(self, graph: Any, x: Tensor) -> Tensor:  # x: (N, F) -> (N, C)
        x = functional.elu(self.first(graph, x).flatten(1))
        logits: Tensor = self.last(graph, x)  # (N, 1, C)
        return logits.squeeze(1)


def dgl_graph(src: Tensor, dst: Tensor, num_nodes: int) -> Any:
    """A graph of DGL's own, for one process. `src`, `dst`: (E,)."""
    return require_dgl().graph((src, dst), num_nodes=num_nodes)
