"""Test accuracy by epoch and by time, of training on the whole graph, on mini-batches, and of averaged models."""

import argparse
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

import sar
from benchmarks import command
from benchmarks.graphs import featured_graph
from benchmarks.models import Model
from benchmarks.plots import draw_averaging
from benchmarks.report import describe_setting, write_section
from benchmarks.results import setting
from sar.adapters.dgl.shim import require_dgl
from sar.host.processes import run_workers
from sar.partition.in_memory import divide
from sar.partition.inspect.text_tables import as_markdown, as_text

PICTURE = "benchmarks-averaging.png"
LEARNING_RATE = 0.003
NEAR = 0.98
"""Of the accuracy that exact training on the whole graph has at best."""

EXACT, AVERAGED, SELDOM = "exact", "averaged", "averaged every 5th"
EXACT_BATCHES, AVERAGED_BATCHES = "exact, mini-batches", "averaged, mini-batches"


@dataclass(frozen=True)
class Curve:
    """A training: epochs so far, seconds of training until then, and test accuracy on the whole graph after them."""

    method: str
    seed: int
    epochs: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    """All trainings on one graph."""

    graph: str
    curves: list[Curve]

    def of(self, method: str) -> list[Curve]:
        return [curve for curve in self.curves if curve.method == method]

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(curve.method for curve in self.curves))


def main(argv: Sequence[str]) -> None:
    """Train with every method and seed, and write the table and the picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies averaging", description=__doc__)
    command.add_paths(parser)
    graphs = ["cora", "dblp_citation", "amazon_computers"]
    parser.add_argument("--graphs", nargs="+", default=graphs, metavar="NAME", help=f"({' '.join(graphs)})")
    parser.add_argument("--workers", type=int, default=2, metavar="W", help="of one thread (%(default)s)")
    parser.add_argument("--parts", type=int, default=4, metavar="P", help="METIS's (%(default)s)")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="trainings of each (%(default)s)")
    parser.add_argument("--epochs", type=int, default=100, metavar="N", help="on the whole graph (%(default)s)")
    parser.add_argument("--batch-epochs", type=int, default=20, metavar="N", help="with mini-batches (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=500, metavar="N", help="of a worker (%(default)s)")
    parser.add_argument("--fanouts", type=int, nargs=3, default=[10, 10, 10], metavar="K", help="(10 10 10)")
    parser.add_argument("--time-limit", type=float, default=1800, metavar="S", help="for one graph (%(default)s)")
    arguments = parser.parse_args(argv)
    with command.work_directory(arguments.work) as work:
        parts = [_measure(arguments, name, work) for name in arguments.graphs]
    words = f"{arguments.workers} workers of 1 thread, {arguments.parts} parts, {arguments.seeds} seeds"
    batches = f"fan-outs {arguments.fanouts}, {arguments.batch_size} seeds of each worker"
    shown = command.shown("benchmarks.studies", ["averaging", *argv])
    conditions = setting(shown, {"training": words, "mini-batches": batches})
    rows = table(parts)
    print(f"\n{as_text(rows)}")
    arguments.docs.mkdir(parents=True, exist_ok=True)
    draw_averaging(
        {part.graph: {method: _line(part.of(method)) for method in part.methods} for part in parts},
        arguments.docs / PICTURE,
    )
    picture = f"![Test accuracy by epoch, exact and averaged]({PICTURE})"
    text = "\n\n".join([describe_setting(conditions), as_markdown(rows), picture])
    write_section(arguments.docs / "benchmarks.md", "averaging", text)


def table(parts: Sequence[Part]) -> list[tuple[str, ...]]:
    """A line for each method: on each graph best accuracy, and epochs and seconds until it is near that of exact."""
    header = ("trained", *(f"{part.graph}: best; epochs, s to {NEAR:.0%} of exact" for part in parts))
    return [header, *((method, *(_cell(part, method) for part in parts)) for method in parts[0].methods)]


def _cell(part: Part, method: str) -> str:
    goal = NEAR * fmean(max(curve.accuracies) for curve in part.of(EXACT))
    best = [max(curve.accuracies) for curve in part.of(method)]
    reached = [_reached(goal, curve) for curve in part.of(method)]
    there = [found for found in reached if found is not None]
    deviation = f" ± {stdev(best):.4f}" if len(best) > 1 else ""
    means = [fmean(numbers) for numbers in zip(*there, strict=True)] if len(there) == len(reached) else None
    return f"{fmean(best):.4f}{deviation}; {'-' if means is None else f'{means[0]:.0f}, {means[1]:.1f}'}"


def _reached(goal: float, curve: Curve) -> tuple[int, float] | None:
    """The first epoch with this accuracy, and the seconds of training until its end."""
    points = zip(curve.epochs, curve.seconds, curve.accuracies, strict=True)
    return next(((epoch, seconds) for epoch, seconds, accuracy in points if accuracy >= goal), None)


def _line(curves: Sequence[Curve]) -> tuple[list[int], list[float]]:
    """Epochs and accuracies, means over seeds."""
    return curves[0].epochs, [fmean(values) for values in zip(*(curve.accuracies for curve in curves), strict=True)]


def _measure(arguments: argparse.Namespace, name: str, work: Path) -> Part:
    """Partition a graph and train on it in worker processes."""
    data = featured_graph(name, arguments.data)
    folder = work / f"averaging-{Path(name).stem}-{arguments.parts}"
    shutil.rmtree(folder, ignore_errors=True)
    curves = run_workers(
        train_all,
        arguments,
        divide(data, folder, "graph", arguments.parts).json_file,
        n_workers=arguments.workers,
        n_threads=1,
        time_limit=arguments.time_limit,
        on_progress=lambda line: print(f"{Path(name).stem} {line}", flush=True),
    )
    return Part(Path(name).stem, curves[0])


# -- in the workers


class Task:
    """This worker's part of a graph, as a part of the whole and as graphs by themselves."""

    def __init__(self, partition_json: Path, job: argparse.Namespace) -> None:
        data = sar.load_dgl_partition_data(partition_json, sar.rank(), "cpu")
        self.job = job
        self.graph = sar.construct_full_graph(data)
        self.parts = sar.train.local_subgraphs(self.graph, data)
        self.x, self.labels, self.train, self.test = (
            sar.suffix_key_lookup(data.node_features, key) for key in ("feat", "label", "train_mask", "test_mask")
        )
        self.num_classes = sar.all_max(int(self.labels.max())) + 1
        self.n_train, self.n_test = self.add_up(self.train.sum(), self.test.sum())

    @staticmethod
    def add_up(*counts: Tensor) -> list[int]:
        total = torch.stack(counts)
        sar.comm.all_reduce(total, dist.ReduceOp.SUM)
        return [int(count) for count in total]

    def optimizer(self, parameters: Any) -> Optimizer:
        return torch.optim.Adam(parameters, lr=LEARNING_RATE)

    @torch.no_grad()
    def accuracy(self, model: Model) -> float:
        right = (model(self.graph, self.x).argmax(1) == self.labels)[self.test]
        return self.add_up(right.sum())[0] / self.n_test


def exact(task: Task, model: Model) -> Callable[[], None]:
    """One step an epoch on the whole graph."""
    sar.sync_params(model)
    optimizer = task.optimizer(model.parameters())

    def epoch() -> None:
        logits = model(task.graph, task.x)[task.train]
        loss = functional.cross_entropy(logits, task.labels[task.train], reduction="sum") / task.n_train
        _step(optimizer, loss, lambda: sar.gather_grads(model))

    return epoch


def exact_batches(task: Task, model: Model) -> Callable[[], None]:
    """Steps on batches whose neighbours may be on any worker; gradients are averaged after each."""
    sampler = sar.DistNeighborSampler(
        task.job.fanouts,
        input_node_features={"feat": task.x},
        output_node_features={"label": task.labels},
        copy_edata=False,
    )
    seeds = sar.split_seeds(task.graph, task.train)
    loader = sar.DataLoader(
        task.graph,
        seeds,
        sampler,
        task.job.batch_size,
        shuffle=True,
        foreign_seeds=True,
    )
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = task.optimizer(model.parameters())

    def epoch() -> None:
        for blocks in loader:
            logits = ddp(blocks, blocks[0].srcdata["feat"])
            _step(optimizer, functional.cross_entropy(logits, blocks[-1].dstdata["label"]))

    return epoch


def averaged(task: Task, model: Model, epochs: int = 1) -> Callable[[], None]:
    """One step an epoch on each part."""

    def train_one(part: Any, optimizer: Optimizer) -> None:
        train = part.ndata["train_mask"]
        logits = model(part, part.ndata["feat"])[train]
        _step(optimizer, functional.cross_entropy(logits, part.ndata["label"][train]))

    trainer = sar.train.LocalTrainer(model, task.optimizer, task.parts)
    return lambda: trainer.train_round(train_one, epochs)


def averaged_seldom(task: Task, model: Model) -> Callable[[], None]:
    """Five of these steps between averages."""
    return averaged(task, model, 5)


def averaged_batches(task: Task, model: Model) -> Callable[[], None]:
    """Steps on batches of each part, by DGL's own loader."""
    loading = require_dgl().dataloading

    def train_one(part: Any, optimizer: Optimizer) -> None:
        seeds = part.ndata["train_mask"].nonzero().squeeze(1)
        sampler = loading.NeighborSampler(task.job.fanouts)
        for inputs, outputs, blocks in loading.DataLoader(
            part, seeds, sampler, batch_size=task.job.batch_size, shuffle=True
        ):
            logits = model(blocks, part.ndata["feat"][inputs])
            _step(optimizer, functional.cross_entropy(logits, part.ndata["label"][outputs]))

    trainer = sar.train.LocalTrainer(model, task.optimizer, task.parts)
    return lambda: trainer.train_round(train_one)


METHODS: dict[str, tuple[Callable[[Task, Model], Callable[[], None]], int]] = {
    EXACT: (exact, 1),
    AVERAGED: (averaged, 1),
    SELDOM: (averaged_seldom, 5),
    EXACT_BATCHES: (exact_batches, 1),
    AVERAGED_BATCHES: (averaged_batches, 1),
}
"""How to train, and how many epochs at a time."""


def train_all(report: Callable[[Any], None], job: argparse.Namespace, partition_json: Path) -> list[Curve]:
    """Train by every method with every seed, one after the other."""
    warnings.filterwarnings("ignore", "Dataloader CPU affinity")
    sar.initialize_comms()
    task = Task(partition_json, job)
    curves = [Curve(method, seed) for seed in range(job.seeds) for method in METHODS]
    for curve in curves:
        _train(task, curve, job.batch_epochs if curve.method.endswith("batches") else job.epochs)
        if sar.rank() == 0:
            report(f"seed {curve.seed}, {curve.method}: {curve.accuracies[-1]:.4f}")
    return curves


def _train(task: Task, curve: Curve, epochs: int) -> None:
    torch.manual_seed(curve.seed)
    model = Model("SAGE", task.x.shape[1], task.num_classes)
    torch.manual_seed(1000 * curve.seed + sar.rank())  # of batches
    make, at_a_time = METHODS[curve.method]
    train, seconds = make(task, model), 0.0
    for epoch in range(at_a_time, epochs + 1, at_a_time):
        begun = time.perf_counter()
        train()
        seconds += time.perf_counter() - begun
        curve.epochs.append(epoch)
        curve.seconds.append(seconds)
        curve.accuracies.append(task.accuracy(model))


def _step(optimizer: Optimizer, loss: Tensor, gather: Callable[[], None] = lambda: None) -> None:
    optimizer.zero_grad()
    loss.backward()
    gather()
    optimizer.step()
