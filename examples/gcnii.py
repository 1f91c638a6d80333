"""GCNII: a deep GCN with initial residual and identity mapping (Chen et al., 2020, arXiv:2007.02133).

    torchrun --nproc-per-node 2 examples/gcnii.py --partition-json partitions/cora/cora.json

Each layer also sees the first one's output, which keeps many layers from making all nodes alike.
"""

import sar  # isort: skip  (before dgl)
import dgl.nn
import torch.nn.functional as F
from common import load, options, train
from torch import Tensor, nn

parser = options(__doc__, layers=16, alpha=0.1, lamda=0.5)


class GCNII(nn.Module):
    """H^(l) = relu(((1 - a) S H^(l-1) + a H^(0)) ((1 - b_l) I + b_l W_l)), with b_l = log(lamda / l + 1)."""

    def __init__(
        self,
        num_features: int,
        hidden: int,
        num_classes: int,
        layers: int,
        alpha: float,
        lamda: float,
        dropout: float,
    ):
        super().__init__()
        self.first = nn.Linear(num_features, hidden)
        convs = [dgl.nn.GCN2Conv(hidden, i, alpha, lamda, bias=False, activation=F.relu) for i in range(1, layers + 1)]
        self.layers = nn.ModuleList(convs)
        self.last = nn.Linear(hidden, num_classes)
        self.dropout = nn.Dropout(dropout)
        for conv in convs:
            nn.init.xavier_uniform_(conv.weight1)  # DGL draws from N(0, 1), under which deep stacks blow up

    def forward(self, graph, x):  # x: (N_i, F) -> (N_i, C)
        first = F.relu(self.first(self.dropout(x)))
        h = first
        for layer in self.layers:
            h = layer(graph, self.dropout(h), first)
        return self.last(self.dropout(h))


def main(argv: list[str] | None = None) -> tuple[list[float], Tensor]:
    arguments = parser.parse_args(argv)
    graph, x, task = load(arguments.partition_json)
    sar.seed(arguments.seed)
    model = GCNII(
        x.shape[1],
        arguments.hidden,
        task.num_classes,
        arguments.layers,
        arguments.alpha,
        arguments.lamda,
        arguments.dropout,
    )
    return train(model, (graph, x), task, arguments)


if __name__ == "__main__":
    main()
