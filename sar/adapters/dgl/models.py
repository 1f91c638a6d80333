"""GraphSAGE, GCN and GAT from DGL's layers, for DGL's graphs and distributed graphs.

Without DGL they consist of `sar.nn.plain_layers`, which run on distributed graphs only.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sar.adapters.dgl.shim import has_dgl, require_dgl
from sar.data.arrays import Array
from sar.errors import ConfigError
from sar.nn import plain_layers

KINDS = ("sage", "gcn", "gat")


def layer_makers() -> dict[str, Callable[..., nn.Module]]:
    """Functions that create a layer of each kind from its two widths, for gat also from the number of heads."""
    layers: Any = require_dgl().nn if has_dgl() else plain_layers
    sage = partial(layers.SAGEConv, aggregator_type="mean") if has_dgl() else layers.SAGEConv
    return dict(zip(KINDS, (sage, layers.GraphConv, layers.GATConv), strict=True))


class LayerStack(nn.Module):
    """A stack of layers with ReLU between them, without dropout.

    Args:
        kind: sage (Hamilton et al., 2017, with mean), gcn (Kipf and Welling, 2017) or gat (Velickovic et al., 2018).
        widths: widths of the input, of hidden layers and of the output: one more than the number of layers.
        heads: heads of gat, whose widths count all heads together; the last layer has one head.
    """

    def __init__(self, kind: str, widths: Sequence[int], heads: int = 1):
        super().__init__()
        if len(widths) < 2 or min(widths) < 1:
            raise ConfigError(f"the model has the widths {tuple(widths)}; expected at least two of at least 1.")
        hidden = tuple(widths[1:-1])
        if kind == "gat" and any(width % heads for width in hidden):
            raise ConfigError(f"hidden widths {hidden} cannot be divided among {heads} heads.")
        make = layer_makers()[kind]
        self.layers = nn.ModuleList()
        for number, (width, next_width) in enumerate(itertools.pairwise(widths), start=1):
            layer_heads = 1 if number == len(widths) - 1 else heads
            shape = (next_width // layer_heads, layer_heads) if kind == "gat" else (next_width,)
            self.layers.append(make(width, *shape))

    def forward(self, graph: Any, x: Tensor) -> Tensor:  # x: (N, F) -> (N, C)
        for layer in self.layers[:-1]:
            x = functional.relu(layer(graph, x).flatten(1))
        logits: Tensor = self.layers[-1](graph, x)
        return logits.flatten(1)


class GraphSAGE(LayerStack):
    """Mean aggregation in each layer (Hamilton et al., 2017), without dropout."""

    def __init__(self, num_features: int, num_classes: int, hidden: int = 64, num_layers: int = 3):
        super().__init__("sage", [num_features, *[hidden] * (num_layers - 1), num_classes])


class GAT(nn.Module):
    """Two attention layers (Velickovic et al., 2018), without dropout."""

    def __init__(self, num_features: int, num_classes: int, hidden: int = 16, num_heads: int = 4):
        super().__init__()
        make = layer_makers()["gat"]
        self.first = make(num_features, hidden, num_heads)
        self.last = make(num_heads * hidden, num_classes, 1)

    def forward(self, graph: Any, x: Tensor) -> Tensor:  # x: (N, F) -> (N, C)
        x = functional.elu(self.first(graph, x).flatten(1))
        logits: Tensor = self.last(graph, x)  # (N, 1, C)
        return logits.squeeze(1)


def dgl_graph(src: Tensor | Array, dst: Tensor | Array, num_nodes: int) -> Any:
    """Create a DGL graph for one process. `src`, `dst`: (E,)."""
    return require_dgl().graph((torch.as_tensor(src), torch.as_tensor(dst)), num_nodes=num_nodes)
