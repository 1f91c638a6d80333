"""SIGN: features propagated over several hops once, then a dense network (Frasca et al., 2020, arXiv:2004.11198).

    torchrun --nproc-per-node 2 examples/sign.py --partition-json partitions/cora/cora.json

Only the propagation looks at the graph. In training, workers exchange no features, but gradients and the statistics of
the batch normalisation.
"""

import sar  # isort: skip  (before dgl)
import dgl.function as fn
import torch
import torch.nn.functional as F
from common import load, options, train
from torch import Tensor, nn

parser = options(__doc__, hops=3)


@torch.no_grad()
def propagated(graph, x: Tensor, hops: int) -> list[Tensor]:
    """[X, S X, ..., S^hops X], (N_i, F) each, with S = D^-1/2 A D^-1/2 of a symmetric graph."""
    scale = graph.in_degrees().clamp(min=1).to(x).pow(-0.5).unsqueeze(1)
    features = [x]
    with graph.local_scope():
        for _ in range(hops):
            graph.ndata["h"] = features[-1] * scale
            graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
            features.append(graph.ndata["h"] * scale)
    return features


class SIGN(nn.Module):
    """Logits = W relu(BN([X W_0, S X W_1, S^2 X W_2, ...]))."""

    def __init__(self, num_features: int, hidden: int, num_classes: int, hops: int, dropout: float):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(num_features, hidden) for _ in range(hops + 1))
        self.norm = sar.DistributedBN1D(hidden * (hops + 1))  # over the nodes of all workers
        self.last = nn.Linear(hidden * (hops + 1), num_classes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features):  # list of (N_i, F) -> (N_i, C)
        h = torch.cat([branch(self.dropout(x)) for branch, x in zip(self.branches, features, strict=True)], 1)
        return self.last(self.dropout(F.relu(self.norm(h))))


def main(argv: list[str] | None = None) -> tuple[list[float], Tensor]:
    arguments = parser.parse_args(argv)
    graph, x, task = load(arguments.partition_json)
    sar.seed(arguments.seed)
    model = SIGN(x.shape[1], arguments.hidden, task.num_classes, arguments.hops, arguments.dropout)
    return train(model, (propagated(graph, x, arguments.hops),), task, arguments)


if __name__ == "__main__":
    main()
