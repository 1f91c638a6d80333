"""Jumping knowledge: a GCN whose output combines all of its layers (Xu et al., 2018, arXiv:1806.03536).

    torchrun --nproc-per-node 2 examples/jumping_knowledge.py --partition-json partitions/cora/cora.json --mode max

Layers are combined node by node, so that only the graph convolutions communicate.
"""

import sar  # isort: skip  (before dgl)
import dgl.nn
import torch.nn.functional as F
from common import load, options, train
from torch import Tensor, nn

parser = options(__doc__, layers=4)
parser.add_argument("--mode", choices=["cat", "max", "lstm"], default="cat", help="how layers are combined")


class JumpingKnowledgeGCN(nn.Module):
    """Logits = W [H^(1), ..., H^(L)], or of their maximum, or of their sum weighted by attention."""

    def __init__(self, num_features: int, hidden: int, num_classes: int, layers: int, mode: str, dropout: float):
        super().__init__()
        widths = [num_features] + [hidden] * layers
        self.layers = nn.ModuleList(
            dgl.nn.GraphConv(widths[i], widths[i + 1], activation=F.relu) for i in range(layers)
        )
        self.combine = dgl.nn.JumpingKnowledge(mode, hidden, layers)
        self.last = nn.Linear(hidden * layers if mode == "cat" else hidden, num_classes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, graph, x):  # x: (N_i, F) -> (N_i, C)
        made = []
        for layer in self.layers:
            x = layer(graph, self.dropout(x))
            made.append(x)
        return self.last(self.combine(made))


def main(argv: list[str] | None = None) -> tuple[list[float], Tensor]:
    arguments = parser.parse_args(argv)
    graph, x, task = load(arguments.partition_json)
    sar.seed(arguments.seed)
    model = JumpingKnowledgeGCN(
        x.shape[1], arguments.hidden, task.num_classes, arguments.layers, arguments.mode, arguments.dropout
    )
    return train(model, (graph, x), task, arguments)


if __name__ == "__main__":
    main()
