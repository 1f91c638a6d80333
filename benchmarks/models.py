"""The models measured, made of DGL's own layers; what they exchange, and what they compute without a graph."""

from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from benchmarks.bounds import Exchanged
from sar.adapters.dgl.shim import require_dgl

MODELS = ("SAGE", "GCN", "GIN", "GAT")
HIDDEN, HEADS, HEAD_WIDTH = 256, 4, 32


class Model(nn.Module):
    """Three layers with ReLU between them, no dropout.

    SAGE: Hamilton et al. (2017), mean aggregation, hidden width 256. GCN: Kipf and Welling (2017), likewise.
    GIN: Xu et al. (2019), sums, and one linear layer in place of an MLP.
    GAT: Velickovic et al. (2018), 4 heads of width 32, side by side, and one head at the end.
    """

    def __init__(self, name: str, num_features: int, num_classes: int):
        super().__init__()
        hidden = HEADS * HEAD_WIDTH if name == "GAT" else HIDDEN
        widths = [num_features, hidden, hidden, num_classes]
        self.name, self.widths = name, widths
        self.layers = nn.ModuleList(self._layer(*widths[i : i + 2], last=i == 2) for i in range(3))

    def _layer(self, width: int, out: int, *, last: bool) -> nn.Module:
        conv = require_dgl().nn
        layer: nn.Module
        if self.name == "GAT":
            layer = conv.GATConv(width, out, 1) if last else conv.GATConv(width, HEAD_WIDTH, HEADS)
        elif self.name == "GIN":
            layer = conv.GINConv(nn.Linear(width, out), "sum")
        else:
            layer = conv.SAGEConv(width, out, "mean") if self.name == "SAGE" else conv.GraphConv(width, out)
        return layer

    def forward(self, graph: Any, x: Tensor) -> Tensor:  # (N, F) -> (N, C)
        """With one graph for all layers, or a list of one for each."""
        graphs = graph if isinstance(graph, list) else [graph] * len(self.layers)
        for index, (layer, graph) in enumerate(zip(self.layers, graphs, strict=True)):
            x = self._activate(layer(graph, x).flatten(1), index)
        return x

    def dense(self, x: Tensor) -> Tensor:  # (N, F) -> (N, C)
        """The forward without message passing: own rows go through the layers' parameters."""
        for index, layer in enumerate(self.layers):
            x = self._activate(self._linear(layer, x), index)
        return x

    def exchanged(self) -> list[Exchanged]:
        """What each layer exchanges."""
        layers = list(pairwise(self.widths))
        if self.name == "GAT":
            return [Exchanged(out, values_read=True) for _, out in layers]
        # Layers multiply first if that makes rows narrower, and the product needs a gradient.
        return [Exchanged(min(i, o), constant=k == 0 and i <= o) for k, (i, o) in enumerate(layers)]

    def _linear(self, layer: Any, x: Tensor) -> Tensor:
        if self.name == "SAGE":
            return layer.fc_self(x) + layer.fc_neigh(x)
        if self.name == "GCN":
            return x @ layer.weight + layer.bias
        if self.name == "GIN":
            return layer.apply_func(x + x)
        return layer.fc(x) + layer.bias

    def _activate(self, x: Tensor, index: int) -> Tensor:
        return x if index == len(self.layers) - 1 else functional.relu(x)
