"""R-GCN with layers of PyTorch Geometric, in a graph of many relations (Schlichtkrull et al., 2018, arXiv:1703.06103).

    sar launch --workers 2 examples/pyg_rgcn.py --partition-json partitions/aifb_het

Nodes need no features: each has a learned embedding, which lives on the worker that owns the node.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import HeteroConv, SAGEConv

import sar

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--partition-json", required=True, help="a partition directory, or its JSON file")
parser.add_argument("--epochs", type=int, default=50)
parser.add_argument("--hidden", type=int, default=16)
parser.add_argument("--lr", type=float, default=0.01)

EdgeTypes = list[tuple[str, str, str]]


class Layer(nn.Module):
    """H_i' = W_0 H_i + b + sum over relations r and in-neighbours j of W_r H_j / |N_i^r|, for nodes of every type."""

    def __init__(self, etypes: EdgeTypes, num_in: int, num_out: int):
        super().__init__()
        convs = {etype: SAGEConv((num_in, num_in), num_out, root_weight=False, bias=False) for etype in etypes}
        self.relations = HeteroConv(convs, aggr="sum")
        self.own = nn.Linear(num_in, num_out)

    def forward(self, x: dict[str, Tensor], edges: dict[tuple[str, str, str], Tensor]) -> dict[str, Tensor]:
        received = self.relations(x, edges)
        return {ntype: self.own(h) + received.get(ntype, 0) for ntype, h in x.items()}


class RGCN(nn.Module):
    def __init__(self, etypes: EdgeTypes, hidden: int, num_classes: int):
        super().__init__()
        self.first = Layer(etypes, hidden, hidden)
        self.last = Layer(etypes, hidden, num_classes)

    def forward(self, x: dict[str, Tensor], edges: dict[tuple[str, str, str], Tensor]) -> dict[str, Tensor]:
        x = {ntype: F.relu(h) for ntype, h in self.first(x, edges).items()}
        return self.last(x, edges)


def main(argv: list[str] | None = None) -> list[float]:
    arguments = parser.parse_args(argv)
    sar.initialize_comms()
    data = sar.pyg.load_partition(arguments.partition_json)  # sar: this worker's nodes, and the edges into them
    [target] = [ntype for ntype in data.node_types if "y" in data[ntype]]
    masks = {"train": data[target].train_mask, "test": data[target].test_mask}
    task = sar.Task(data[target].y, masks)  # sar: counts over all workers
    sar.seed(0)  # sar: other numbers for the embeddings of other nodes
    model = RGCN(data.edge_types, arguments.hidden, task.num_classes)
    sar.sync_params(model)  # sar: the parameters of worker 0 for all
    rows = {ntype: torch.randn(data[ntype].num_nodes, arguments.hidden) for ntype in data.node_types}
    embeddings = nn.ParameterDict(rows)  # of own nodes: their gradients are whole
    optimizer = torch.optim.Adam([*model.parameters(), *embeddings.parameters()], lr=arguments.lr)
    losses = []
    for epoch in range(arguments.epochs):
        out = model(dict(embeddings.items()), data.edge_index_dict)[target]
        loss = task.loss(out)  # sar: this worker's share of the mean
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)  # sar: sums the gradients over the workers
        optimizer.step()
        losses.append(sar.all_sum(loss.item()))
        accuracy = task.accuracy(out.detach(), "test")
        sar.print(f"epoch {epoch}: loss {losses[-1]:.6f}, test accuracy {accuracy:.4f}")
    return losses


if __name__ == "__main__":
    main()
