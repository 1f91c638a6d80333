"""What the demo's processes do: train one model, on a part of the graph with sar or on all of it with plain DGL."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import sar
from sar.adapters.dgl.layers.models import GAT, GraphSAGE, dgl_graph
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


def train_distributed(report: Callable[[Epoch], None], job: Job, partition_json: Path, parameters: Path) -> Run:
    """Train on this worker's part in the default mode; worker 0 saves the trained parameters."""
    sar.Config.cache_constant_inputs = True
    sar.initialize_comms()
    sar.patch_dgl()
    data = sar.load_dgl_partition_data(str(partition_json), sar.rank(), "cpu")
    task, x = sar.Task.of(data), sar.suffix_key_lookup(data.node_features, "feat")
    original_ids = data.node_features["orig_id"].numpy()
    graph = sar.construct_full_graph(data)
    del data
    _warm_up(job, sar.construct_full_graph(_tiny_partition(sar.rank(), sar.world_size())))
    model = _model(job, x)
    sar.sync_params(model)
    run = _fit(report, model, graph, x, task, job, original_ids)
    if sar.rank() == 0:
        torch.save(model.state_dict(), parameters)
    return run


def train_single(report: Callable[[Epoch], None], job: Job, graph_file: Path, parameters: Path) -> tuple[Run, Any]:
    """Train on the whole graph with plain DGL; also returns the logits, (N, C), at the parameters in the file."""
    sar.initialize_comms()  # a group of one worker, for the same loop
    data = read_npz(graph_file)
    graph = dgl_graph(torch.from_numpy(data.src), torch.from_numpy(data.dst), data.num_nodes)
    fields = {key: torch.from_numpy(value) for key, value in data.node_data.items()}
    x, task = fields["feat"], sar.Task(fields["label"], {name.removesuffix("_mask"): fields[name] for name in SPLIT})
    original_ids = np.arange(data.num_nodes)
    del data
    _warm_up(job, dgl_graph(*_tiny_edges(0, 0), TINY))
    model = _model(job, x)
    run = _fit(report, model, graph, x, task, job, original_ids)
    model.load_state_dict(torch.load(parameters, weights_only=True))
    return run, _evaluate(model, graph, x).numpy()


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


def _model(job: Job, x: Tensor) -> nn.Module:
    torch.manual_seed(job.seed)
    return MODELS[job.model](x.shape[1], job.num_classes)


def _fit(
    report: Callable[[Epoch], None], model: nn.Module, graph: Any, x: Tensor, task: sar.Task, job: Job, ids: Any
) -> Run:
    """The training loop, the same for one process and for many; worker 0 reports."""
    optimizer = torch.optim.Adam(model.parameters(), lr=job.learning_rate)
    losses, seconds = [], []
    memory = PeakMemory()
    sent = sar.comm.statistics().bytes_sent
    for _ in range(job.epochs):
        start = time.perf_counter()
        logits = model(graph, x)
        loss = task.loss(logits)
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        losses.append(sar.all_sum(loss.item()))
        # Without dropout, the training forward's output is what validation would compute.
        epoch = Epoch(losses[-1], task.accuracy(logits, "val"))
        if sar.rank() == 0:
            report(epoch)
        seconds.append(time.perf_counter() - start)
    sent = sar.comm.statistics().bytes_sent - sent
    peak_rise = memory.rise()
    logits = _evaluate(model, graph, x)
    return Run(losses, seconds, task.accuracy(logits, "test"), peak_rise, sent / job.epochs, ids, logits.numpy())


@torch.no_grad()
def _evaluate(model: nn.Module, graph: Any, x: Tensor) -> Tensor:
    model.eval()
    logits: Tensor = model(graph, x)
    return logits
