"""What the measured processes do: train one model with plain DGL, or with sar on one part of the graph."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import sar
from benchmarks.bounds import bytes_needed
from benchmarks.clock import Time
from benchmarks.floors import aggregation_time, dense_time
from benchmarks.models import Model
from benchmarks.npz import read_npz
from sar.adapters.dgl.models import dgl_graph
from sar.comm.allocator import set_allocator
from sar.host.memory import PeakMemory
from sar.kernels import load_kernels

FIELDS = ("feat", "label", "train_mask")


@dataclass(frozen=True)
class Job:
    """One model to train, and how.

    warm_up: first epochs, whose time and bytes do not count; their memory does.
    mode: 1, 2 or 3 (README.md, "Three modes").
    wire: name of the dtype on the wire; None is exact.
    allocator: `Config.allocator`.
    """

    model: str
    num_classes: int
    warm_up: int
    epochs: int
    learning_rate: float
    seed: int
    mode: int = 1
    wire: str | None = None
    allocator: str = "least"


@dataclass(frozen=True)
class Construction:
    """Of one worker: seconds, and memory in bytes.

    kernels: seconds to load the compiler of the CPU kernels, once a process.
    load, construct: seconds of `load_dgl_partition_data` and `construct_full_graph`.
    construct_rise: peak resident memory of `construct_full_graph` above the level with `PartitionData` loaded.
    graph_bytes: what stays of it.
    """

    kernels: float
    load: float
    construct: float
    construct_rise: int
    graph_bytes: int


@dataclass(frozen=True)
class Traffic:
    """Of one worker, median epoch.

    sent, received: bytes by the library's counters.
    needed: bytes that it has to send at least: `bytes_needed`, and the parameters' gradients once.
    waited: seconds by the library's counter.
    dense, aggregation: seconds of an epoch's parts alone, all workers at once; `_processor`: of processors.
    """

    sent: float
    received: float
    needed: int
    waited: float
    dense: float
    aggregation: float
    dense_processor: float
    aggregation_processor: float


@dataclass(frozen=True)
class Measurement:
    """What one process reports.

    losses: of all epochs, over all workers; seconds: of the epochs after the first `Job.warm_up`.
    processor: seconds of processors an epoch; the mean of the same epochs.
    resident, rise: bytes of resident memory just before the first epoch, and of the peak above that.
    construction, traffic: of sar's workers only.
    """

    num_nodes: int
    losses: list[float]
    seconds: list[float]
    processor: float
    resident: int
    rise: int
    construction: Construction | None = None
    traffic: Traffic | None = None


def single(_: Callable[[Any], None], job: Job, graph_file: Path) -> Measurement:
    """Train on the whole graph with plain DGL, with the allocator and the huge pages of the workers."""
    sar.Config.allocator = job.allocator
    set_allocator()
    data = read_npz(graph_file)
    graph = dgl_graph(*data.ends(), data.total_nodes)
    fields = {key: torch.from_numpy(data.node_data["_N"][key]) for key in FIELDS}
    graph.create_formats_()  # else the first epoch would
    del data
    task = _Task(graph, fields, int(fields["train_mask"].sum()), lambda model: None)
    run = _train(_model(job, task), task, job)
    return Measurement(graph.num_nodes(), *run[:-1])


def worker(_: Callable[[Any], None], job: Job, partition_json: Path) -> Measurement:
    """Train on this worker's part with sar."""
    sar.Config.disable_sr = job.mode == 2
    sar.Config.allocator = job.allocator
    if job.wire is not None:
        sar.Config.wire_dtype_features = sar.Config.wire_dtype_gradients = getattr(torch, job.wire)
    sar.initialize_comms()
    sar.patch_dgl()
    graph, fields, construction = _construct(partition_json)
    if job.mode == 3:
        graph = graph.get_full_partition_graph()
    n_train = fields["train_mask"].sum()
    sar.comm.all_reduce(n_train, dist.ReduceOp.SUM)
    task = _Task(graph, fields, int(n_train), sar.gather_grads)
    model = _model(job, task)
    sar.sync_params(model)
    run = _train(model, task, job)
    losses = torch.tensor(run.losses, dtype=torch.float64)
    sar.comm.all_reduce(losses, dist.ReduceOp.SUM)
    traffic = _traffic(model, task, job, run.moved)
    return Measurement(graph.num_nodes(), losses.tolist(), *run[1:-1], construction, traffic)


class _Task(NamedTuple):
    """A graph or a part of one, its `FIELDS`, training nodes of all parts, and how to add up gradients."""

    graph: Any
    fields: dict[str, Tensor]
    n_train: int
    gather_gradients: Callable[[Model], None]


class _Run(NamedTuple):
    """As `Measurement`; losses are this worker's, and `moved` is the library's counters by epoch."""

    losses: list[float]
    seconds: list[float]
    processor: float
    resident: int
    rise: int
    moved: list[sar.comm.Statistics]


def _model(job: Job, task: _Task) -> Model:
    torch.manual_seed(job.seed)
    return Model(job.model, task.fields["feat"].shape[1], job.num_classes)


def _train(model: Model, task: _Task, job: Job) -> _Run:
    """The training loop, the same for one process and for many."""
    optimizer = torch.optim.Adam(model.parameters(), lr=job.learning_rate)
    x, labels, train = (task.fields[key] for key in FIELDS)
    losses, seconds, moved = [], [], []
    memory = PeakMemory()
    for epoch in range(job.warm_up + job.epochs):
        if epoch == job.warm_up:
            timed = Time.now()
        before, start = sar.comm.statistics(), time.perf_counter()
        loss = functional.cross_entropy(model(task.graph, x)[train], labels[train], reduction="sum") / task.n_train
        optimizer.zero_grad()
        loss.backward()
        task.gather_gradients(model)
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        moved.append(sar.comm.statistics() - before)
    spent = timed.since().processor / job.epochs
    return _Run(losses, seconds[job.warm_up :], spent, memory.baseline, memory.above_baseline(), moved[job.warm_up :])


def _construct(partition_json: Path) -> tuple[Any, dict[str, Tensor], Construction]:
    """This worker's part, its fields, and what it took."""
    start = time.perf_counter()
    load_kernels()
    kernels = time.perf_counter() - start
    _meet()
    start = time.perf_counter()
    data = sar.load_dgl_partition_data(str(partition_json), sar.rank(), "cpu")
    load = time.perf_counter() - start
    memory = PeakMemory()
    _meet()
    start = time.perf_counter()
    graph = sar.construct_full_graph(data)
    construct, rise = time.perf_counter() - start, memory.above_baseline()
    kept = PeakMemory().baseline - memory.baseline
    fields = {key: sar.suffix_key_lookup(data.node_features, key) for key in FIELDS}
    return graph, fields, Construction(kernels, load, construct, rise, kept)


def _traffic(model: Model, task: _Task, job: Job, moved: list[sar.comm.Statistics]) -> Traffic:
    """The median epoch's counters, and its floors."""
    relation, layers = task.graph.call_context().relation, model.exchanged()
    gradients = sum(parameter.nbytes for parameter in model.parameters()) if sar.world_size() > 1 else 0
    needed = gradients + bytes_needed(
        relation.plan.halo_counts,
        sar.rank(),
        layers,
        kept=job.mode != 1,
        item_bytes=4 if job.wire is None else getattr(torch, job.wire).itemsize,
    )
    _meet()
    x, labels, train = (task.fields[key] for key in FIELDS)
    sar.Config.check_replicas = False  # from here on every worker trains by itself
    dense = [dense_time(model, x, labels, train) for _ in range(job.epochs)]
    _meet()
    aggregation = [aggregation_time(relation, layers) for _ in range(job.epochs)]
    return Traffic(
        median(epoch.bytes_sent for epoch in moved),
        median(epoch.bytes_received for epoch in moved),
        needed,
        median(epoch.seconds_waited for epoch in moved),
        *(median(one.wall for one in parts) for parts in (dense, aggregation)),
        *(median(one.processor for one in parts) for parts in (dense, aggregation)),
    )


def _meet() -> None:
    """Wait until every worker is here."""
    sar.comm.all_reduce(torch.zeros(1), dist.ReduceOp.SUM)
