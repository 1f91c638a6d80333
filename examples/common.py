"""Shared code of the model examples: their options, and the loop of `full_graph.py`.

A model is a `torch.nn.Module` that returns one row per node of this worker, written as for one machine.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sar  # isort: skip  (before dgl)
import torch
from torch import Tensor, nn


def options(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with the options of every model example; `defaults` replaces values below and adds more options."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partition-json", required=True, help="the JSON file of a partition directory")
    parser.add_argument("--checkpoint", metavar="DIR", help="save every epoch to DIR, and resume from it")
    values = {"epochs": 100, "hidden": 64, "lr": 0.01, "weight_decay": 5e-4, "dropout": 0.0, "seed": 0} | defaults
    for name, value in values.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default {value}")
    return parser


def load(partition_json: str) -> tuple[sar.GraphShardManager, Tensor, sar.Task]:
    """Load this worker's part of a homogeneous graph, its features, (N_i, F), and its task."""
    sar.initialize_comms()  # rank, number of workers and address come from torchrun
    data = sar.load_dgl_partition_data(partition_json, sar.rank(), "cpu")
    return sar.construct_full_graph(data), sar.suffix_key_lookup(data.node_features, "feat"), sar.Task.of(data)


def accuracies(task: sar.Task, logits: Tensor) -> str:
    """Accuracy on each mask, over all workers, as text."""
    shares = {part: found["accuracy"] for part, found in task.metrics(logits).items()}
    return "accuracy " + ", ".join(f"{part} {share:.4f}" for part, share in shares.items())


def train(
    model: nn.Module,
    inputs: Sequence[Any],
    task: Any,
    arguments: argparse.Namespace,
    quality: Callable[[Any, Tensor], str] = accuracies,
    local_parameters: Iterable[nn.Parameter] = (),
) -> tuple[list[float], Tensor]:
    """Train with Adam, and print loss and quality of every epoch.

    Args:
        model: called as `model(*inputs)`; the same on all workers.
        inputs: the graph, features and so on.
        task: its `loss` returns this worker's share of the loss for the model's output.
        arguments: from `options`.
        quality: called with the task and the model's output; returns text to print after the loss.
        local_parameters: parameters of this worker's nodes only. Their gradients are complete after the backward, so
            they are neither copied from worker 0 nor summed.

    Returns:
        The loss of every epoch, and the model's final output without dropout.
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
        losses.append(sar.all_sum(loss).item())
        if arguments.checkpoint:
            sar.save_checkpoint(arguments.checkpoint, **state, step=epoch + 1, extra=losses)
        sar.print(f"epoch {epoch}: loss {losses[-1]:.6f}, {quality(task, predictions(model, inputs))}")
    return losses, predictions(model, inputs)


def predictions(model: nn.Module, inputs: Sequence[Any]) -> Tensor:
    """The model's output for this worker's nodes, without dropout."""
    model.eval()
    with torch.no_grad():
        made: Tensor = model(*inputs)
    return made
