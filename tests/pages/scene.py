"""What the examples on most pages take for granted: a graph, a model of two layers, and who trains on what.

For comments on pages: `from tests.pages.scene import *`. The run needs the files `graph`.
"""

import sar  # isort: skip  (before dgl)
import dgl
import dgl.function as fn
import torch
import torch.nn.functional as F
from dgl.nn import SAGEConv

__all__ = [
    "F",
    "GraphSAGE",
    "data",
    "dgl",
    "fn",
    "graph",
    "labels",
    "model",
    "num_train",
    "optimizer",
    "sar",
    "torch",
    "train",
    "x",
]


class GraphSAGE(torch.nn.Module):
    """Takes a graph, or the blocks of a batch."""

    def __init__(self, num_layers: int = 2):
        super().__init__()
        widths = [12, *[16] * (num_layers - 1), 4]
        self.layers = torch.nn.ModuleList(map(lambda *ends: SAGEConv(*ends, "mean"), widths[:-1], widths[1:]))

    def forward(self, graph, h):
        graphs = graph if isinstance(graph, list) else [graph] * len(self.layers)
        for number, (block, layer) in enumerate(zip(graphs, self.layers, strict=True)):
            h = layer(block, h if number == 0 else h.relu())
        return h


sar.initialize_comms()
data = sar.load_dgl_partition_data("partitions/graph", sar.rank(), "cpu")
graph = sar.construct_full_graph(data)
x, labels, train = data["feat"], data["label"], data["train_mask"]
num_train = sar.all_sum(train.sum())
torch.manual_seed(0)
model = GraphSAGE()
sar.sync_params(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
