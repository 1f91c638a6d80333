"""Full-graph training of a GAT of PyTorch Geometric: the loop to copy.

    sar launch --workers 2 examples/pyg_gat.py --partition-json partitions/cora

The model is as for one machine. What is not PyTorch Geometric and PyTorch is marked.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GATConv

import sar

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--partition-json", required=True, help="a partition directory, or its JSON file")
parser.add_argument("--epochs", type=int, default=50)
parser.add_argument("--hidden", type=int, default=8)
parser.add_argument("--heads", type=int, default=8)
parser.add_argument("--dropout", type=float, default=0.6)
parser.add_argument("--lr", type=float, default=0.005)


class GAT(torch.nn.Module):
    def __init__(self, num_features: int, hidden: int, heads: int, num_classes: int, dropout: float):
        super().__init__()
        self.first = GATConv(num_features, hidden, heads, dropout=dropout)
        self.last = GATConv(hidden * heads, num_classes, dropout=dropout)
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(x, self.dropout, self.training)
        x = F.elu(self.first(x, edge_index))
        return self.last(F.dropout(x, self.dropout, self.training), edge_index)


def main(argv: list[str] | None = None) -> list[float]:
    arguments = parser.parse_args(argv)
    sar.initialize_comms()
    data = sar.pyg.load_partition(arguments.partition_json)  # sar: this worker's nodes, and the edges into them
    task = sar.Task(data.y, {"train": data.train_mask, "test": data.test_mask})  # sar: counts over all workers
    sar.seed(0)
    model = GAT(data.num_features, arguments.hidden, arguments.heads, task.num_classes, arguments.dropout)
    sar.sync_params(model)  # sar: copies the parameters of worker 0
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr, weight_decay=5e-4)
    losses = []
    for epoch in range(arguments.epochs):
        model.train()
        loss = task.loss(model(data.x, data.edge_index))  # sar: this worker's share of the mean
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)  # sar: sums the gradients over the workers
        optimizer.step()
        losses.append(sar.all_sum(loss.item()))
        sar.print(f"epoch {epoch}: loss {losses[-1]:.6f}")
    model.eval()
    with torch.no_grad():
        sar.print(f"test accuracy {task.accuracy(model(data.x, data.edge_index), 'test'):.4f}")
    return losses


if __name__ == "__main__":
    main()
