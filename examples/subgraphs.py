"""Mini-batch training of a graph convolution network on sampled subgraphs, then its exact accuracy on the whole graph.

    torchrun --nproc-per-node 2 examples/subgraphs.py --partition-json partitions/cora/cora.json --sampler walk

Every worker takes subgraphs of its own: of random walks, nodes or edges from the whole graph (GraphSAINT, Zeng et al.
2020), or of clusters of its nodes (Cluster-GCN, Chiang et al. 2019).
"""

import itertools
from typing import Any

import sar  # isort: skip  (before dgl)
import dgl.nn
import torch
import torch.nn.functional as F
from common import accuracies, load, options
from torch import Tensor, nn

parser = options(__doc__, epochs=10, batches=20, num_workers=0)
parser.add_argument("--sampler", choices=["node", "edge", "walk", "cluster"], default="walk")
parser.add_argument("--budget", type=int, nargs="+", help="nodes or edges (500); roots and length of walks (200 2)")


class GCN(nn.Module):
    """Means over in-edges, as sums with the weight 1 / in-degree on every edge."""

    def __init__(self, num_features: int, hidden: int, num_classes: int):
        super().__init__()
        widths = [num_features, hidden, num_classes]
        self.layers = nn.ModuleList(
            dgl.nn.GraphConv(*pair, norm="none", allow_zero_in_degree=True) for pair in itertools.pairwise(widths)
        )

    def forward(self, graph: Any, x: Tensor, weight: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(graph, F.relu(x) if number else x, edge_weight=weight)
        return x


def main(argv: list[str] | None = None) -> None:
    arguments = parser.parse_args(argv)
    graph, x, task = load(arguments.partition_json)
    graph.dstdata["share"] = 1 / graph.in_degrees().clamp(min=1).float()
    graph.apply_edges(lambda edges: {"share": edges.dst["share"]})  # an edge field, which subgraphs come with
    features = {"feat": x, "label": task.labels, "train": task.masks["train"]}
    batch_size = 1
    sampler: sar.ClusterGCNSampler | sar.SAINTSampler
    if arguments.sampler == "cluster":
        sampler = sar.ClusterGCNSampler(graph, 4 * arguments.batches, input_node_features=features)
        seeds, batch_size = sampler.cluster_ids, 4  # clusters in a batch
    else:
        budget = arguments.budget or ([200, 2] if arguments.sampler == "walk" else [500])
        budget = tuple(budget) if arguments.sampler == "walk" else budget[0]
        sampler = sar.SAINTSampler(arguments.sampler, budget, input_node_features=features)
        seeds = torch.arange(arguments.batches)  # subgraphs in an epoch
    sar.seed(arguments.seed)  # of batches too
    loader = sar.DataLoader(graph, seeds, sampler, batch_size, shuffle=True, num_workers=arguments.num_workers)
    model = GCN(x.shape[1], arguments.hidden, task.num_classes)
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr, weight_decay=arguments.weight_decay)

    for epoch in range(arguments.epochs):
        total = torch.zeros(())
        for subgraph in loader:  # as many on every worker
            train, weight = subgraph.ndata["train"], subgraph.edata["share"]
            # A cluster has each node once an epoch; GraphSAINT undoes how likely each node and edge is.
            of_losses = subgraph.ndata.get("loss_weight", torch.full((len(train),), float(len(loader))))
            logits = model(subgraph, subgraph.ndata["feat"], weight * subgraph.edata.get("aggregator_weight", 1))
            losses = F.cross_entropy(logits[train], subgraph.ndata["label"][train], reduction="none")
            loss = (of_losses[train] * losses).sum() / task.sizes["train"]
            if arguments.sampler != "cluster":
                loss = loss / sar.world_size()  # each worker estimates the loss of the whole graph
            optimizer.zero_grad()
            loss.backward()
            sar.gather_grads(model)
            optimizer.step()
            total += loss.detach() / len(loader)
        sar.print(f"epoch {epoch}: loss {sar.all_sum(total):.6f}")

    model.eval()
    with torch.no_grad():
        sar.print("on the whole graph:", accuracies(task, model(graph, x, graph.edata["share"])))


if __name__ == "__main__":
    main()
