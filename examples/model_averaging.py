"""Model averaging: every partition is trained on by itself, and the models are averaged after each round.

    sar launch --workers 2 examples/model_averaging.py --partition-json partitions/cora/cora.json

This is an approximation (Huang et al., "SDT-GNN"), which sends the model and nothing else. A worker that has several
partitions trains on one after the other. With `sar launch --workers 1 --resident 1 --spill DIR` features of one
partition at a time are in memory; the results are the same.
"""

from typing import Any

import sar  # isort: skip  (before dgl)
import dgl.nn
import torch
import torch.nn.functional as F
from common import accuracies, options, predictions
from torch import Tensor, nn

parser = options(__doc__, epochs=30)
parser.add_argument("--epochs-per-round", type=int, default=1, help="on each partition, before models are averaged")


class GraphSAGE(nn.Module):
    def __init__(self, num_features: int, hidden: int, num_classes: int):
        super().__init__()
        self.first = dgl.nn.SAGEConv(num_features, hidden, "mean")
        self.last = dgl.nn.SAGEConv(hidden, num_classes, "mean")

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.last(graph, F.relu(self.first(graph, x)))


def main(argv: list[str] | None = None) -> None:
    arguments = parser.parse_args(argv)
    sar.initialize_comms()
    data = sar.load_dgl_partition_data(arguments.partition_json, sar.rank(), "cpu")
    graph, x, task = sar.construct_full_graph(data), data.node_features["_N/feat"], sar.Task.of(data)
    parts = sar.train.local_subgraphs(graph, data)  # a DGLGraph for each partition of this worker
    sar.seed(arguments.seed)
    model = GraphSAGE(x.shape[1], arguments.hidden, task.num_classes)

    def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=arguments.lr, weight_decay=arguments.weight_decay)

    def train_one(part: Any, optimizer: torch.optim.Optimizer) -> None:
        train = part.ndata["train_mask"].bool()  # False on the halo
        logits = model(part, part.ndata["feat"])
        loss = F.cross_entropy(logits[train], part.ndata["label"][train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    trainer = sar.train.LocalTrainer(model, make_optimizer, parts)
    state: dict[str, Any] = {"model": model, "loaders": trainer}
    first = sar.load_checkpoint(arguments.checkpoint, **state, missing_ok=True)["step"] if arguments.checkpoint else 0
    for epoch in range(first, arguments.epochs):
        trainer.train_round(train_one, arguments.epochs_per_round)
        if arguments.checkpoint:
            sar.save_checkpoint(arguments.checkpoint, **state, step=epoch + 1)
        logits = predictions(model, (graph, x))  # exact, on the whole graph
        sar.print(f"epoch {epoch}: {accuracies(task, logits)}, loss {sar.all_sum(task.loss(logits)):.6f}")


if __name__ == "__main__":
    main()
