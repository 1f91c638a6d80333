"""What the demo's processes do: train one model, on a part of the graph with sar or on all of it with plain DGL."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import sar
from sar.adapters.dgl.layers.models import GAT, GraphSAGE, dgl_graph
from sar.comm.allocator import set_allocator
from sar.common_tuples import SPLIT
from sar.host.memory import PeakMemory
from sar.partition.graph_data import read_npz

MODELS: dict[str, type[nn.Module]] = {"GraphSAGE": GraphSAGE, "GAT": GAT}

TINY = 8
"""Nodes of the graph that warms up a process, and features of its nodes."""


@dataclass(frozen=True)
class Job:
    """One model to train: a key of `MODELS`, its number of classes, and how long and how fast to train it."""

    model: str
    num_classes: int
    epochs: int
    learning_rate: float
    seed: int


class Epoch(NamedTuple):
    """Loss and validation accuracy (0 to 1) of one epoch, before its step of the optimiser."""

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
    """A graph or a part of one, its fields as in `GraphData.node_data`, and how to add up over all parts."""

    graph: Any
    fields: dict[str, Tensor]
    add_up: Callable[[Tensor], Tensor]
    gather_gradients: Callable[[nn.Module], None]

    def accuracy(self, logits: Tensor, mask: str) -> float:
        chosen = self.fields[mask]
        correct = (logits.argmax(1) == self.fields["label"])[chosen].sum()
        right, total = self.add_up(torch.stack([correct, chosen.sum()]).double()).tolist()
        return float(right / max(total, 1))


def train_distributed(report: Callable[[Epoch], None], job: Job, partition_json: Path, parameters: Path) -> Run:
    """Train on this worker's part in the default mode; worker 0 saves the trained parameters."""
    sar.Config.cache_constant_inputs = True
    sar.initialize_comms()
    sar.patch_dgl()
    data = sar.load_dgl_partition_data(str(partition_json), sar.rank(), "cpu")
    fields = {key: sar.suffix_key_lookup(data.node_features, key) for key in ("feat", "label", *SPLIT)}
    original_ids = data.node_features["orig_id"].numpy()
    graph = sar.construct_full_graph(data)
    del data

    def add_up(values: Tensor) -> Tensor:
        sar.comm.all_reduce(values, dist.ReduceOp.SUM)
        return values

    task = _Task(graph, fields, add_up, sar.gather_grads)
    _warm_up(job, sar.construct_full_graph(_tiny_partition(sar.rank(), sar.world_size())))
    model = _model(job, task)
    sar.sync_params(model)
    run = _fit(report if sar.rank() == 0 else _silent, model, task, job, original_ids)
    if sar.rank() == 0:
        torch.save(model.state_dict(), parameters)
    return run


def train_single(report: Callable[[Epoch], None], job: Job, graph_file: Path, parameters: Path) -> tuple[Run, Any]:
    """Train on the whole graph with plain DGL; also returns the logits, (N, C), at the parameters in the file."""
    set_allocator()  # as the workers do
    data = read_npz(graph_file)
    graph = dgl_graph(torch.from_numpy(data.src), torch.from_numpy(data.dst), data.num_nodes)
    fields = {key: torch.from_numpy(value) for key, value in data.node_data.items()}
    task = _Task(graph, fields, lambda values: values, lambda model: None)
    original_ids = np.arange(data.num_nodes)
    del data
    _warm_up(job, dgl_graph(*_tiny_edges(0, 0), TINY))
    model = _model(job, task)
    run = _fit(report, model, task, job, original_ids)
    model.load_state_dict(torch.load(parameters, weights_only=True))
    return run, _evaluate(model, task).numpy()


def _warm_up(job: Job, graph: Any) -> None:
    """Train one step on a tiny graph, so that loading and compiling code counts neither as time nor as memory."""
    model = MODELS[job.model](TINY, job.num_classes)
    model(graph, torch.rand(TINY, TINY, requires_grad=True)).sum().backward()


def _tiny_partition(rank: int, world_size: int) -> sar.PartitionData:
    """A complete graph of `TINY` nodes on each worker."""
    shards = [sar.ShardEdgesAndFeatures(_tiny_edges(source, rank), {}) for source in range(world_size)]
    ranges = [(start, start + TINY) for start in range(0, world_size * TINY, TINY)]
    return sar.PartitionData(shards, ranges, {}, ["_N"], [("_N", "_E", "_N")])


def _tiny_edges(source: int, destination: int) -> tuple[Tensor, Tensor]:
    """Edges from every node of one part to every node of another, (TINY * TINY,) each, by destination."""
    nodes = torch.arange(TINY)
    return source * TINY + nodes.repeat(TINY), destination * TINY + nodes.repeat_interleave(TINY)


def _model(job: Job, task: _Task) -> nn.Module:
    torch.manual_seed(job.seed)
    return MODELS[job.model](task.fields["feat"].shape[1], job.num_classes)


def _fit(report: Callable[[Epoch], None], model: nn.Module, task: _Task, job: Job, original_ids: Any) -> Run:
    """The training loop, the same for one process and for many."""
    optimizer = torch.optim.Adam(model.parameters(), lr=job.learning_rate)
    x, labels, train = (task.fields[key] for key in ("feat", "label", "train_mask"))
    n_train = task.add_up(train.sum().double()).item()
    losses, seconds = [], []
    memory = PeakMemory()
    sent = sar.comm.statistics().bytes_sent
    for _ in range(job.epochs):
        start = time.perf_counter()
        logits = model(task.graph, x)
        loss = functional.cross_entropy(logits[train], labels[train], reduction="sum") / n_train
        optimizer.zero_grad()
        loss.backward()
        task.gather_gradients(model)
        optimizer.step()
        losses.append(task.add_up(loss.detach().double()).item())
        # Without dropout, the training forward's output is what validation would compute.
        report(Epoch(losses[-1], task.accuracy(logits.detach(), "val_mask")))
        seconds.append(time.perf_counter() - start)
    sent = sar.comm.statistics().bytes_sent - sent
    peak_rise = memory.rise()
    logits = _evaluate(model, task)
    accuracy = task.accuracy(logits, "test_mask")
    return Run(losses, seconds, accuracy, peak_rise, sent / job.epochs, original_ids, logits.numpy())


@torch.no_grad()
def _evaluate(model: nn.Module, task: _Task) -> Tensor:
    model.eval()
    logits: Tensor = model(task.graph, task.fields["feat"])
    return logits


def _silent(_: Epoch) -> None:
    """Where progress goes on workers other than 0."""
