"""R-GCN: entity classification in a graph of many relations (Schlichtkrull et al., 2018, arXiv:1703.06103).

    torchrun --nproc-per-node 2 examples/rgcn.py --partition-json partitions/aifb_het/aifb_het.json

Nodes need no features: each has a learned embedding, which lives on the worker that owns the node.
"""

import sar  # isort: skip  (before dgl)
import dgl.nn
import torch
import torch.nn.functional as F
from common import options, train
from torch import Tensor, nn

parser = options(__doc__, epochs=50, hidden=16, layers=2, weight_decay=0.0)


class Layer(nn.Module):
    """H_i' = W_0 H_i + b + sum over relations r and in-neighbours j of W_r H_j / |N_i^r|, for nodes of every type."""

    def __init__(self, etypes: list[tuple[str, str, str]], num_in: int, num_out: int):
        super().__init__()
        convs = {etype: dgl.nn.GraphConv(num_in, num_out, norm="right", bias=False) for etype in etypes}
        self.relations = dgl.nn.HeteroGraphConv(convs, aggregate="sum")
        self.own = nn.Linear(num_in, num_out)

    def forward(self, graph, x):  # x: {node type: (N_i, F)} -> {node type: (N_i, F')}
        received = self.relations(graph, x)
        return {ntype: self.own(h) + received.get(ntype, 0) for ntype, h in x.items()}


class RGCN(nn.Module):
    def __init__(self, etypes: list[tuple[str, str, str]], target: str, hidden: int, num_classes: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(Layer(etypes, hidden, hidden) for _ in range(layers - 1))
        self.last = Layer(etypes, hidden, num_classes)
        self.target = target

    def forward(self, graph, x):  # x: {node type: (N_i, F)} -> (N_i, C) of the target type
        for layer in self.layers:
            x = {ntype: F.relu(h) for ntype, h in layer(graph, x).items()}
        return self.last(graph, x)[self.target]


def embeddings(counts: dict[str, int], width: int, seed: int) -> nn.ParameterDict:
    """A learned row for each node, (N_i, width), by node type."""
    generator = torch.Generator().manual_seed(seed)
    return nn.ParameterDict({ntype: torch.randn(n, width, generator=generator) for ntype, n in counts.items()})


def main(argv: list[str] | None = None) -> tuple[list[float], Tensor]:
    arguments = parser.parse_args(argv)
    sar.initialize_comms()
    data = sar.load_dgl_partition_data(arguments.partition_json, sar.rank(), "cpu")
    graph, task = sar.construct_full_graph(data), sar.Task.of(data)
    [target] = [ntype for ntype in graph.ntypes if f"{ntype}/label" in data.node_features]
    sar.seed(arguments.seed)
    model = RGCN(graph.canonical_etypes, target, arguments.hidden, task.num_classes, arguments.layers)
    counts = {ntype: graph.num_nodes(ntype) for ntype in graph.ntypes}
    x = embeddings(counts, arguments.hidden, arguments.seed + sar.rank())  # other nodes, other numbers
    return train(model, (graph, x), task, arguments, local_parameters=x.parameters())


if __name__ == "__main__":
    main()
