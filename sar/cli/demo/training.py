"""What the demo's processes do: train one model, on a part of the graph with sar or on all of it with plain DGL."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import sar
from sar.adapters.dgl.models import GAT, GraphSAGE, dgl_graph
from sar.cli.memory import PeakMemory
from sar.partition.graph_data import read_npz

MODELS: dict[str, type[nn.Module]] = {"GraphSAGE": GraphSAGE, "GAT": GAT}


@dataclass(frozen=True)
class Job:
    """One model to train: a key of `MODELS`, its number of classes, and how long and how fast to train it."""

    model: str
    num_classes: int
    epochs: int
    learning_rate: float
    seed: int


class Epoch(NamedTuple):
    """Loss and validation accuracy (0 to 1) before the optimiser's step number `index`."""

    index: int
    loss: float
    val_accuracy: float


@dataclass
class Run:
    """What one process reports: memory in bytes, `bytes_sent` per epoch, `seconds` one for each epoch.

    `logits`, (N_i, C), belong to the nodes `original_ids`, (N_i,), of the input graph.
    """

    losses: list[float]
    seconds: list[float]
    test_accuracy: float
    peak_rise: int
    bytes_sent: float
    original_ids: Any
    logits: Any


class _Task(NamedTuple):
    """A graph or a part of one: features (N_i, F), labels (N_i,), masks (N_i,), and how to add up over all parts."""

    graph: Any
    features: Tensor
    labels: Tensor
    train: Tensor
    val: Tensor
    test: Tensor
    add_up: Callable[[Tensor], Tensor]
    gather_gradients: Callable[[nn.Module], None]

    def accuracy(self, logits: Tensor, mask: Tensor) -> float:
        correct = (logits.argmax(1) == self.labels)[mask].sum()
        right, total = self.add_up(torch.stack([correct, mask.sum()]).double()).tolist()
        return float(right / max(total, 1))


def train_distributed(report: Callable[[Epoch], None], job: Job, partition_json: Path, parameters: Path) -> Run:
    """Train on this worker's part in the default mode; worker 0 saves the trained parameters."""
    sar.initialize_comms()
    sar.patch_dgl()
    data = sar.load_dgl_partition_data(str(partition_json), sar.rank(), "cpu")
    fields = {key: sar.suffix_key_lookup(data.node_features, key) for key in ("feat", "label")}
    masks = [sar.suffix_key_lookup(data.node_features, f"{part}_mask").bool() for part in ("train", "val", "test")]
    original_ids = data.node_features["orig_id"].numpy()
    graph = sar.construct_full_graph(data)
    del data

    def add_up(values: Tensor) -> Tensor:
        sar.comm.all_reduce(values, torch.distributed.ReduceOp.SUM)
        return values

    task = _Task(graph, fields["feat"], fields["label"], *masks, add_up, sar.gather_grads)
    model = _model(job, task)
    sar.sync_params(model)
    run = _fit(report if sar.rank() == 0 else _silent, model, task, job, original_ids)
    if sar.rank() == 0:
        torch.save(model.state_dict(), parameters)
    return run


def train_single(report: Callable[[Epoch], None], job: Job, graph_file: Path, parameters: Path) -> tuple[Run, Any]:
    """Train on the whole graph with plain DGL; also returns the logits, (N, C), at the parameters in the file."""
    data = read_npz(graph_file)
    graph = dgl_graph(torch.from_numpy(data.src), torch.from_numpy(data.dst), data.num_nodes)
    fields = {key: torch.from_numpy(value) for key, value in data.node_data.items()}
    task = _Task(
        graph,
        *(fields[key] for key in ("feat", "label", "train_mask", "val_mask", "test_mask")),
        add_up=lambda values: values,
        gather_gradients=lambda model: None,
    )
    original_ids = np.arange(data.num_nodes)
    del data
    model = _model(job, task)
    run = _fit(report, model, task, job, original_ids)
    model.load_state_dict(torch.load(parameters, weights_only=True))
    return run, _evaluate(model, task).numpy()


def _model(job: Job, task: _Task) -> nn.Module:
    torch.manual_seed(job.seed)
    return MODELS[job.model](task.features.shape[1], job.num_classes)


def _fit(report: Callable[[Epoch], None], model: nn.Module, task: _Task, job: Job, original_ids: Any) -> Run:
    """The training loop, the same for one process and for many."""
    optimizer = torch.optim.Adam(model.parameters(), lr=job.learning_rate)
    n_train = task.add_up(task.train.sum().double()).item()
    losses, seconds = [], []
    memory = PeakMemory()
    sent = sar.comm.statistics().bytes_sent
    for index in range(job.epochs):
        start = time.perf_counter()
        logits = model(task.graph, task.features)
        loss = functional.cross_entropy(logits[task.train], task.labels[task.train], reduction="sum") / n_train
        optimizer.zero_grad()
        loss.backward()
        task.gather_gradients(model)
        optimizer.step()
        losses.append(task.add_up(loss.detach().double()).item())
        # Without dropout, the training forward's output is what validation would compute.
        report(Epoch(index, losses[-1], task.accuracy(logits.detach(), task.val)))
        seconds.append(time.perf_counter() - start)
    sent = sar.comm.statistics().bytes_sent - sent
    peak_rise = memory.rise()
    logits = _evaluate(model, task)
    accuracy = task.accuracy(logits, task.test)
    return Run(losses, seconds, accuracy, peak_rise, sent / job.epochs, original_ids, logits.numpy())


@torch.no_grad()
def _evaluate(model: nn.Module, task: _Task) -> Tensor:
    model.eval()
    return model(task.graph, task.features)


def _silent(_: Epoch) -> None:
    """Where progress goes on workers other than 0."""
