"""What the model examples share: a node classification task over all workers, and the loop that trains on it.

A model is a `torch.nn.Module` that returns logits for this worker's nodes, (N_i, C); it is written as for one machine.
`link_prediction.py` trains by the same loop, on a task of its own.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sar  # isort: skip  (before dgl)
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def options(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with the options of every model example; `defaults` replaces values below and adds more options."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partition-json", required=True, help="the JSON file of a partition directory")
    parser.add_argument("--checkpoint", metavar="DIR", help="save every epoch to DIR, and go on from what is there")
    values = {"epochs": 100, "hidden": 64, "lr": 0.01, "weight_decay": 5e-4, "dropout": 0.0, "seed": 0} | defaults
    for name, value in values.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default {value}")
    return parser


def add_up(value: Tensor) -> Tensor:
    """The sum over all workers, in place."""
    sar.comm.all_reduce(value, torch.distributed.ReduceOp.SUM)
    return value


@dataclass(frozen=True)
class Task:
    """This worker's labelled nodes, and what has to be known of the others'."""

    labels: Tensor  # (N_i,), -1 where there is none
    masks: dict[str, Tensor]  # train, val, test, as far as the data has them: (N_i,) bool
    sizes: dict[str, int]  # nodes in each mask, over all workers
    num_classes: int

    @classmethod
    def of(cls, data: sar.PartitionData) -> "Task":
        """The task that comes with a partition; of its node types only one may have labels."""
        labels = sar.suffix_key_lookup(data.node_features, "label")
        names = {name.rpartition("/")[2] for name in data.node_features}
        masks = {
            part: sar.suffix_key_lookup(data.node_features, f"{part}_mask")
            for part in ("train", "val", "test")
            if f"{part}_mask" in names
        }
        sizes = {part: int(add_up(mask.sum())) for part, mask in masks.items()}
        highest = torch.cat([labels, labels.new_tensor([-1])]).max()  # a worker may have no labelled node
        sar.comm.all_reduce(highest, torch.distributed.ReduceOp.MAX)
        return cls(labels, masks, sizes, int(highest) + 1)

    def loss(self, logits: Tensor) -> Tensor:
        """This worker's share of the mean cross-entropy over all training nodes."""
        train = self.masks["train"]
        return F.cross_entropy(logits[train], self.labels[train], reduction="sum") / self.sizes["train"]

    def accuracy(self, logits: Tensor) -> str:
        """Accuracy on each mask, over all workers, as text."""
        correct = logits.argmax(1) == self.labels
        shares = {part: add_up(correct[mask].sum()).item() / self.sizes[part] for part, mask in self.masks.items()}
        return ", ".join(f"{part} {share:.4f}" for part, share in shares.items())

    def quality(self, logits: Tensor) -> str:
        """What to print of an epoch beside the loss."""
        return f"accuracy {self.accuracy(logits)}"


def load(partition_json: str) -> tuple[sar.GraphShardManager, Tensor, Task]:
    """This worker's part of a homogeneous graph, its features, (N_i, F), and the task on it."""
    sar.initialize_comms()  # rank, number of workers and address come from torchrun
    data = sar.load_dgl_partition_data(partition_json, sar.rank(), "cpu")
    return sar.construct_full_graph(data), sar.suffix_key_lookup(data.node_features, "feat"), Task.of(data)


def train(
    model: nn.Module,
    inputs: Sequence[Any],
    task: Any,
    arguments: argparse.Namespace,
    local_parameters: Iterable[nn.Parameter] = (),
) -> tuple[list[float], Tensor]:
    """Train with Adam, and print loss and quality of every epoch.

    Args:
        model: called as `model(*inputs)`; alike on all workers.
        inputs: the graph, features and so on.
        task: what to learn: `loss` and `quality` of what the model returns, as a `Task` has them.
        arguments: from `options`.
        local_parameters: parameters of this worker's nodes only. Their gradients are whole after the backward, so they
            are neither copied from worker 0 nor summed.

    Returns:
        The loss of every epoch, and the logits after the last one.
    """
    sar.sync_params(model)
    parameters = [*model.parameters(), *local_parameters]
    optimizer = torch.optim.Adam(parameters, lr=arguments.lr, weight_decay=arguments.weight_decay)
    losses: list[float] = []
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    first = 0
    if arguments.checkpoint:
        loaded = sar.load_checkpoint(arguments.checkpoint, **state, missing_ok=True)
        first, losses = loaded["step"], loaded["extra"] or []
    for epoch in range(first, arguments.epochs):
        model.train()
        loss = task.loss(model(*inputs))
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        losses.append(add_up(loss.detach()).item())
        if arguments.checkpoint:
            sar.save_checkpoint(arguments.checkpoint, **state, step=epoch + 1, extra=losses)
        report(f"epoch {epoch}: loss {losses[-1]:.6f}, {task.quality(predictions(model, inputs))}")
    return losses, predictions(model, inputs)


def predictions(model: nn.Module, inputs: Sequence[Any]) -> Tensor:
    """The logits of this worker's nodes, without dropout."""
    model.eval()
    with torch.no_grad():
        logits: Tensor = model(*inputs)
    return logits


def report(line: str) -> None:
    """Print on worker 0 only."""
    if sar.rank() == 0:
        print(line, flush=True)
