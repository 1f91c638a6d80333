"""Correct and smooth: predictions without a graph, mended by two propagations (Huang et al., 2020, arXiv:2010.13993).

    torchrun --nproc-per-node 2 examples/correct_and_smooth.py --partition-json partitions/cora/cora.json

The network is trained on features alone; the labels of the training nodes then mend what it says of the others.
"""

import sar  # isort: skip  (before dgl)
import dgl.nn
import torch
import torch.nn.functional as F
from common import accuracies, load, options, train
from torch import Tensor, nn

parser = options(__doc__, steps=50, alpha_correct=0.9, alpha_smooth=0.8)


class MLP(nn.Sequential):
    def __init__(self, num_features: int, hidden: int, num_classes: int, dropout: float):
        super().__init__(
            nn.Dropout(dropout),
            nn.Linear(num_features, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, num_classes),
        )


def correct(graph, soft: Tensor, known: Tensor, train: Tensor, steps: int, alpha: float) -> Tensor:
    """Add to each prediction the errors of the training nodes, spread along the edges and scaled as they are there.

    Args:
        graph: symmetric.
        soft: (N_i, C) predicted probabilities.
        known: (N_i, C) one-hot labels.
        train: (N_i,) bool.
        steps: number of propagations.
        alpha: share of the neighbours in each.
    """
    errors = (known - soft) * train.unsqueeze(1)
    spread = dgl.nn.LabelPropagation(steps, alpha, clamp=False)(graph, errors)
    size = sar.all_sum(errors.abs().sum()) / sar.all_sum(train.sum())  # of an average error, over all workers
    return soft + size * F.normalize(spread, p=1)


def smooth(graph, soft: Tensor, known: Tensor, train: Tensor, steps: int, alpha: float) -> Tensor:
    """Spread predictions, and labels where they are known, along the edges; arguments as of `correct`."""
    return dgl.nn.LabelPropagation(steps, alpha, clamp=False)(graph, torch.where(train.unsqueeze(1), known, soft))


def main(argv: list[str] | None = None) -> tuple[list[float], Tensor]:
    arguments = parser.parse_args(argv)
    graph, x, task = load(arguments.partition_json)
    sar.seed(arguments.seed)
    model = MLP(x.shape[1], arguments.hidden, task.num_classes, arguments.dropout)
    losses, logits = train(model, (x,), task, arguments)
    known = F.one_hot(task.labels.clamp(min=0), task.num_classes).to(logits)
    labelled = known, task.masks["train"], arguments.steps
    corrected = correct(graph, logits.softmax(1), *labelled, arguments.alpha_correct)
    sar.print("corrected:", accuracies(task, corrected))
    smoothed = smooth(graph, corrected, *labelled, arguments.alpha_smooth)
    sar.print("corrected and smoothed:", accuracies(task, smoothed))
    return losses, smoothed


if __name__ == "__main__":
    main()
