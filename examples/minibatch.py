"""Mini-batch training of a GraphSAGE network on sampled neighbours, then its exact accuracy on the whole graph.

    torchrun --nproc-per-node 2 examples/minibatch.py --partition-json partitions/cora/cora.json

Every worker takes batches of its own training nodes; their neighbours may be on any worker.
"""

import itertools
from collections.abc import Iterable
from typing import Any

import sar  # isort: skip  (before dgl)
import dgl.nn
import torch
import torch.nn.functional as F
from common import accuracies, load, options
from torch import Tensor, nn

parser = options(__doc__, epochs=20, batch_size=100, num_workers=0, parameters="")
parser.add_argument("--fanouts", type=int, nargs="+", default=[10, 10], help="for each layer (10 10); -1 for all")


class GraphSAGE(nn.Module):
    """Mean aggregation (Hamilton et al., 2017) on one graph for each layer: blocks, or the whole graph each time."""

    def __init__(self, num_features: int, hidden: int, num_classes: int, num_layers: int):
        super().__init__()
        widths = [num_features, *[hidden] * (num_layers - 1), num_classes]
        self.layers = nn.ModuleList(dgl.nn.SAGEConv(*pair, "mean") for pair in itertools.pairwise(widths))

    def forward(self, graphs: Iterable[Any], x: Tensor) -> Tensor:
        for number, (layer, graph) in enumerate(zip(self.layers, graphs, strict=True)):
            x = layer(graph, F.relu(x) if number else x)
        return x


def main(argv: list[str] | None = None) -> None:
    arguments = parser.parse_args(argv)
    graph, x, task = load(arguments.partition_json)
    seeds = task.masks["train"].nonzero().squeeze(1) + graph.node_ranges[sar.rank()][0]  # global IDs
    sampler = sar.DistNeighborSampler(
        arguments.fanouts, input_node_features={"feat": x}, output_node_features={"label": task.labels}
    )
    sar.seed(arguments.seed)  # also seeds batches
    loader = sar.DataLoader(
        graph,
        seeds,
        sampler,
        batch_size=arguments.batch_size,
        shuffle=True,
        num_workers=arguments.num_workers,
    )
    model = GraphSAGE(x.shape[1], arguments.hidden, task.num_classes, len(arguments.fanouts))
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr, weight_decay=arguments.weight_decay)

    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loaders": loader}
    first = 0
    if arguments.checkpoint:
        first = sar.load_checkpoint(arguments.checkpoint, **state, missing_ok=True)["step"]
    for epoch in range(first, arguments.epochs):
        total = torch.zeros(())
        for blocks in loader:  # the same number on all workers; some may be empty
            labels = blocks[-1].dstdata["label"]
            count = sar.all_sum(len(labels))  # seeds of this batch on all workers
            logits = model(blocks, blocks[0].srcdata["feat"])
            loss = F.cross_entropy(logits, labels, reduction="sum") / count
            optimizer.zero_grad()
            loss.backward()
            sar.gather_grads(model)  # sums, as for the whole graph
            optimizer.step()
            total += loss.detach() / len(loader)
        sar.print(f"epoch {epoch}: loss {sar.all_sum(total):.6f}")
        if arguments.checkpoint:
            sar.save_checkpoint(arguments.checkpoint, **state, step=epoch + 1)

    model.eval()
    with torch.no_grad():
        sar.print("on the whole graph:", accuracies(task, model([graph] * len(model.layers), x)))
    if arguments.parameters and sar.rank() == 0:
        torch.save(model.state_dict(), arguments.parameters)


if __name__ == "__main__":
    main()
