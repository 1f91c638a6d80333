"""Full-graph training of a GraphSAGE network: the loop to copy.

    torchrun --nproc-per-node 2 examples/full_graph.py --partition-json partitions/cora/cora.json

There may be any number of workers, whatever the number of partitions (`partition_graph.py` makes them). Training ends
when the validation accuracy has not risen for some epochs; then the best model is tested. With `--max-restarts 1 ...
--checkpoint DIR` it goes on from the last epoch where a worker dies. What is not plain DGL and PyTorch is marked.
"""

import argparse
from typing import Any

import sar  # isort: skip  (before dgl)
import dgl.nn
import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--partition-json", required=True, help="the JSON file of a partition directory")
parser.add_argument("--epochs", type=int, default=200, help="at most (%(default)s)")
parser.add_argument("--patience", type=int, default=20, help="epochs without better validation accuracy (%(default)s)")
parser.add_argument("--checkpoint", metavar="DIR", help="save every epoch to DIR, and resume from it")
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.01)


class GraphSAGE(torch.nn.Module):
    def __init__(self, num_features: int, hidden: int, num_classes: int):
        super().__init__()
        self.first = dgl.nn.SAGEConv(num_features, hidden, "mean")
        self.last = dgl.nn.SAGEConv(hidden, num_classes, "mean")

    def forward(self, graph, x):  # x: (N_i, F) -> (N_i, C), N_i nodes of this worker's partition
        return self.last(graph, F.relu(self.first(graph, x)))


def main() -> None:
    arguments = parser.parse_args()
    sar.initialize_comms()  # sar: rank, number of workers and address come from torchrun
    data = sar.load_dgl_partition_data(arguments.partition_json, sar.rank(), "cpu")  # sar: this worker's partition
    graph = sar.construct_full_graph(data)  # sar: a graph for DGL's layers that spans all workers
    x: Any = data["feat"]  # sar: instead of graph.ndata; (N_i, F)
    task = sar.Task.of(data)  # sar: labels and masks, with counts over all workers

    sar.seed(0)  # sar: dropout would differ between workers
    model = GraphSAGE(x.shape[1], arguments.hidden, task.num_classes)
    sar.sync_params(model)  # sar: copies the parameters of worker 0
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)
    stop = sar.EarlyStopping(arguments.patience)  # sar: keeps the best model

    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loaders": stop}
    first = 0
    if arguments.checkpoint:
        first = sar.load_checkpoint(arguments.checkpoint, **state, missing_ok=True)["step"]  # sar: resumes

    for epoch in range(first, arguments.epochs):
        model.train()
        loss = task.loss(model(graph, x))  # sar: local sum / global count
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)  # sar: sums the gradients over the workers
        optimizer.step()

        model.eval()
        with torch.no_grad():
            accuracy = task.accuracy(model(graph, x), "val")  # sar: over all workers
        sar.print(f"epoch {epoch}: loss {sar.all_sum(loss):.6f}, validation accuracy {accuracy:.4f}")
        done = stop.step(accuracy, model)  # sar: the same on all workers
        if arguments.checkpoint:
            sar.save_checkpoint(arguments.checkpoint, **state, step=epoch + 1)
        if sar.should_stop():  # sar: the job must end; it resumes from the checkpoint when restarted
            return
        if done:
            break

    stop.load_best(model)
    model.eval()
    with torch.no_grad():
        sar.print(f"test accuracy {task.accuracy(model(graph, x), 'test'):.4f}")


if __name__ == "__main__":
    main()
