"""The models measured, of DGL's layers and of PyTorch Geometric's, and what one of DGL's exchanges."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from sar.adapters.dgl.shim import require_dgl

MODELS = ("SAGE", "GCN", "GIN", "GAT")
HIDDEN, HEADS, HEAD_WIDTH = 256, 4, 32


class Exchanged(NamedTuple):
    """What one layer exchanges of each halo row."""

    columns: int  # width of a row
    constant: bool = False  # it needs no gradient, as the input features
    values_read: bool = False  # the derivative reads the sources' values, so dropping them costs another fetch


class Model(nn.Module):
    """Three layers with ReLU between them, no dropout.

    SAGE: Hamilton et al. (2017), mean aggregation, hidden width 256. GCN: Kipf and Welling (2017), likewise.
    GIN: Xu et al. (2019), sums, and one linear layer in place of an MLP.
    GAT: Velickovic et al. (2018), 4 heads of width 32, side by side, and one head at the end.
    """

    def __init__(self, name: str, num_features: int, num_classes: int):
        super().__init__()
        hidden = HEADS * HEAD_WIDTH if name == "GAT" else HIDDEN
        self.name, self.widths = name, [num_features, hidden, hidden, num_classes]
        makers = self.layer_makers()
        self.layers = nn.ModuleList(makers[name](i, o, k == 2) for k, (i, o) in enumerate(pairwise(self.widths)))

    def layer_makers(self) -> dict[str, Callable[[int, int, bool], nn.Module]]:
        """Functions of two widths, and of whether the layer is the last."""
        conv = require_dgl().nn
        return {
            "SAGE": lambda i, o, last: conv.SAGEConv(i, o, "mean"),
            "GCN": lambda i, o, last: conv.GraphConv(i, o),
            "GIN": lambda i, o, last: conv.GINConv(nn.Linear(i, o), "sum"),
            "GAT": lambda i, o, last: conv.GATConv(
                i, *((o, 1) if last else (HEAD_WIDTH, HEADS)), allow_zero_in_degree=True
            ),
        }

    def forward(self, graph: Any, x: Tensor) -> Tensor:  # (N, F) -> (N, C)
        """With one graph for all layers, or a list of one for each."""
        graphs = graph if isinstance(graph, list) else [graph] * len(self.layers)
        for index, (layer, graph) in enumerate(zip(self.layers, graphs, strict=True)):
            x = self._activate(self.call(layer, graph, x).flatten(1), index)
        return x

    def call(self, layer: Any, graph: Any, x: Tensor) -> Tensor:
        out: Tensor = layer(graph, x)
        return out

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


class PygModel(Model):
    """The same of PyTorch Geometric's layers; its graph is an edge index or a sparse matrix."""

    def layer_makers(self) -> dict[str, Callable[[int, int, bool], nn.Module]]:
        from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv

        return {
            "SAGE": lambda i, o, last: SAGEConv(i, o),
            "GCN": lambda i, o, last: GCNConv(i, o, add_self_loops=False, cached=True),
            "GIN": lambda i, o, last: GINConv(nn.Linear(i, o)),
            "GAT": lambda i, o, last: GATConv(i, *((o, 1) if last else (HEAD_WIDTH, HEADS)), add_self_loops=False),
        }

    def call(self, layer: Any, graph: Any, x: Tensor) -> Tensor:
        out: Tensor = layer(x, graph)
        return out
