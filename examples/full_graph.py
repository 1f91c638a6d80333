"""Full-graph training of a GraphSAGE network: the loop to copy.

    torchrun --nproc-per-node 2 examples/full_graph.py --partition-json partitions/cora/cora.json

There may be any number of workers, whatever the number of partitions (`partition_graph.py` makes them). With
`--max-restarts 1 ... --checkpoint DIR` training goes on from the last epoch where a worker dies. What is not plain DGL
and PyTorch is marked.
"""

import argparse
from typing import Any

import sar  # isort: skip  (before dgl)
import dgl.nn
import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--partition-json", required=True, help="the JSON file of a partition directory")
parser.add_argument("--epochs", type=int, default=50)
parser.add_argument("--checkpoint", metavar="DIR", help="save every epoch to DIR, and go on from what is there")
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.01)


class GraphSAGE(torch.nn.Module):
    def __init__(self, num_features: int, hidden: int, num_classes: int):
        super().__init__()
        self.first = dgl.nn.SAGEConv(num_features, hidden, "mean")
        self.last = dgl.nn.SAGEConv(hidden, num_classes, "mean")

    def forward(self, graph, x):  # x: (N_i, F) -> (N_i, C), N_i nodes of this worker's partition
        return self.last(graph, F.relu(self.first(graph, x)))


def add_up(value: torch.Tensor) -> torch.Tensor:
    """The sum over all workers, in place."""
    sar.comm.all_reduce(value, torch.distributed.ReduceOp.SUM)
    return value


def main() -> None:
    arguments = parser.parse_args()
    sar.initialize_comms()  # sar: rank, number of workers and address come from torchrun
    data = sar.load_dgl_partition_data(arguments.partition_json, sar.rank(), "cpu")  # sar: this worker's partition
    x = sar.suffix_key_lookup(data.node_features, "feat")  # (N_i, F)
    labels = sar.suffix_key_lookup(data.node_features, "label")  # (N_i,)
    train, test = (sar.suffix_key_lookup(data.node_features, f"{part}_mask") for part in ("train", "test"))
    graph = sar.construct_full_graph(data)  # sar: a graph for DGL's layers that spans all workers

    # Numbers that concern the whole graph are taken over all workers.
    num_train, num_test = add_up(torch.stack([train.sum(), test.sum()])).tolist()
    highest = labels.max()
    sar.comm.all_reduce(highest, torch.distributed.ReduceOp.MAX)

    torch.manual_seed(0)
    model = GraphSAGE(x.shape[1], arguments.hidden, int(highest) + 1)
    sar.sync_params(model)  # sar: the parameters of worker 0 for all
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)

    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    first = 0
    if arguments.checkpoint:
        first = sar.load_checkpoint(arguments.checkpoint, **state, missing_ok=True)["step"]  # sar: model, draws and all

    for epoch in range(first, arguments.epochs):
        logits = model(graph, x)
        loss = F.cross_entropy(logits[train], labels[train], reduction="sum") / num_train  # local sum / global count
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)  # sar: sums the gradients over the workers
        optimizer.step()
        loss = add_up(loss.detach())
        if arguments.checkpoint:
            sar.save_checkpoint(arguments.checkpoint, **state, step=epoch + 1)
        if sar.rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.6f}")

    model.eval()
    with torch.no_grad():
        correct = (model(graph, x).argmax(1) == labels)[test].sum()
    correct = add_up(correct)
    if sar.rank() == 0:
        print(f"test accuracy {correct.item() / num_test:.4f}")


if __name__ == "__main__":
    main()
