"""APPNP: predict by features alone, then propagate the predictions (Klicpera et al., 2019, arXiv:1810.05997).

    torchrun --nproc-per-node 2 examples/appnp.py --partition-json partitions/cora/cora.json

Propagation has no parameters, so that it can be long, and the network before it looks at each node alone.
"""

import sar  # isort: skip  (before dgl)
import dgl.nn
from common import load, options, train
from torch import Tensor, nn

parser = options(__doc__, steps=10, alpha=0.1)


class APPNP(nn.Module):
    """Z^(0) = MLP(X), Z^(t+1) = (1 - alpha) S Z^(t) + alpha Z^(0), with S = D^-1/2 A D^-1/2."""

    def __init__(self, num_features: int, hidden: int, num_classes: int, steps: int, alpha: float, dropout: float):
        super().__init__()
        self.predict = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(num_features, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, num_classes),
        )
        self.propagate = dgl.nn.APPNPConv(steps, alpha)

    def forward(self, graph, x):  # x: (N_i, F) -> (N_i, C)
        return self.propagate(graph, self.predict(x))


def main(argv: list[str] | None = None) -> tuple[list[float], Tensor]:
    arguments = parser.parse_args(argv)
    graph, x, task = load(arguments.partition_json)
    sar.seed(arguments.seed)
    model = APPNP(x.shape[1], arguments.hidden, task.num_classes, arguments.steps, arguments.alpha, arguments.dropout)
    return train(model, (graph, x), task, arguments)


if __name__ == "__main__":
    main()
