"""Training on message flow graphs: only what the logits of the training nodes depend on is computed and sent.

    torchrun --nproc-per-node 2 examples/mfg.py --partition-json partitions/cora/cora.json

For few training nodes or few layers; with all nodes as seeds it is the whole graph again. Evaluated on the whole graph.
"""

import argparse
import itertools
from typing import Any

import sar  # isort: skip  (before dgl)
import dgl.nn
import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--partition-json", required=True, help="a partition directory, or its JSON file")
parser.add_argument("--epochs", type=int, default=50)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.01)


class GraphSAGE(torch.nn.Module):
    def __init__(self, num_features, hidden, num_classes, num_layers):
        super().__init__()
        widths = [num_features, *[hidden] * (num_layers - 1), num_classes]
        self.layers = torch.nn.ModuleList(dgl.nn.SAGEConv(*pair, "mean") for pair in itertools.pairwise(widths))

    def forward(self, graphs, x):  # one graph for each layer: message flow graphs, or the whole graph each time
        for number, (layer, graph) in enumerate(zip(self.layers, graphs, strict=True)):
            x = layer(graph, F.relu(x) if number else x)
        return x


def main(argv=None):
    """Train; returns the last logits of the training nodes and those of all of this worker's nodes."""
    arguments = parser.parse_args(argv)
    sar.initialize_comms()
    data = sar.load_dgl_partition_data(arguments.partition_json, sar.rank(), "cpu")
    x: Any = data["feat"]  # (N_i, F)
    task = sar.Task.of(data)

    seeds = task.masks["train"].nonzero().squeeze(1)  # rows of this worker's nodes; a worker may have none
    blocks = sar.construct_mfgs(data, {"_N": seeds}, arguments.layers)
    inputs = x[blocks[0].input_nodes]  # features that the first layer starts from
    of_seeds = sar.Task(task.labels[seeds], {"train": torch.ones(len(seeds), dtype=torch.bool)})
    sar.print(f"{blocks[0].num_edges_global()} edges in the first layer, {blocks[-1].num_edges_global()} in the last")

    sar.seed(0)
    model = GraphSAGE(x.shape[1], arguments.hidden, task.num_classes, arguments.layers)
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)
    for epoch in range(arguments.epochs):
        loss = of_seeds.loss(model(blocks, inputs))  # rows are in the order of the seeds
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        sar.print(f"epoch {epoch}: loss {sar.all_sum(loss):.6f}")

    graph = sar.construct_full_graph(data)
    model.eval()
    with torch.no_grad():
        logits = model([graph] * arguments.layers, x)
        of_training = model(blocks, inputs)
    sar.print(f"test accuracy {task.accuracy(logits, 'test'):.4f}")
    return of_training, logits[seeds]


if __name__ == "__main__":
    main()
