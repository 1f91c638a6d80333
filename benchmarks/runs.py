"""Runs several ways to train interleaved, each in new processes, and takes ratios within a repeat."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import measure
from benchmarks.graphs import Prepared
from benchmarks.measure import DGL, Job, Measurement
from sar.errors import SarError
from sar.host.processes import run_workers

LOSS_TOLERANCE = 2e-3
"""Relative difference of losses: round-off grows slowly in training, a wrong exchange shows at once."""


class Way(NamedTuple):
    """A way to train: `workers` of sar, or one process without sar if 0."""

    name: str
    workers: int = 0
    mode: int = 1
    layers: str = DGL
    bf16: bool = False  # under autocast in bfloat16
    order: str = "clusters"  # of the nodes of a partition


def in_bfloat16(way: Way) -> Way:
    """The way under autocast in bfloat16."""
    return way._replace(name=f"{way.name}, bfloat16", bf16=True)


@dataclass(frozen=True)
class Plan:
    """The measurements on a graph. All ways are compared with the first."""

    models: Sequence[str]
    ways: Sequence[Way]
    repeats: int
    job: Job  # common settings; model, classes, layers and mode are set for each run
    threads: int  # of all workers together, at least one each
    time_limit: float  # seconds for one run
    worker: Callable[..., Measurement] = measure.worker
    host: str = "127.0.0.1"  # address of the first worker


class Spread(NamedTuple):
    """Median, minimum and maximum of the repeats."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        listed = list(values)
        return cls(median(listed), min(listed), max(listed))

    def text(self, digits: int = 2) -> str:
        """Formatted as `1.20 (1.10-1.40)`, or only the median if all are equal."""
        middle = f"{self.median:.{digits}f}"
        if self.least == self.greatest:
            return middle
        return f"{middle} ({self.least:.{digits}f}-{self.greatest:.{digits}f})"


class Run(NamedTuple):
    """One training run: `processes` by rank, and `single`, the run to compare with."""

    processes: list[Measurement]
    single: list[Measurement]

    @property
    def seconds(self) -> float:
        """The median epoch of the slowest process."""
        return slowest_epoch(self.processes)

    @property
    def over_single(self) -> float:
        return self.seconds / slowest_epoch(self.single)

    @property
    def rise(self) -> float:
        """Peak memory of the largest process, in bytes."""
        return max(process.rise for process in self.processes)

    @property
    def share(self) -> float:
        """Peak memory over the memory of one process times the worker's fraction of nodes, maximum; 1 is ideal."""
        total, whole = sum(process.num_nodes for process in self.processes), self.single[0].rise
        return max(process.rise * total / (whole * process.num_nodes) for process in self.processes)

    @property
    def sent(self) -> float:
        """Bytes of the worker that sends most."""
        return max(process.traffic.sent for process in self.processes)


def slowest_epoch(processes: Sequence[Measurement]) -> float:
    """Seconds of the median epoch of the slowest process."""
    return max(median(process.seconds) for process in processes)


@dataclass(frozen=True)
class Results:
    """The runs on one graph, by model and way, one per repeat."""

    graph: Prepared
    runs: dict[tuple[str, Way], list[Run]] = field(default_factory=dict)

    def spread(self, model: str, way: Way, number: Callable[[Run], float]) -> Spread:
        """The spread of a number of each run."""
        return Spread.of(map(number, self.runs[model, way]))


def run_all(graph: Prepared, plan: Plan) -> Results:
    """Measure every way of every model once per repeat, and print a line for each run.

    Raises:
        SarError: a run failed, or its losses differ from those of the first way.
    """
    results = Results(graph)
    for repeat in range(plan.repeats):
        for model in plan.models:
            job = replace(plan.job, model=model, num_classes=graph.num_classes)
            single: list[Measurement] = []
            for way in plan.ways:
                if model == "GAT" and way.layers == measure.PYG_CSR:
                    continue  # its layer does not support it
                processes = _train(graph, plan, replace(job, mode=way.mode, layers=way.layers, bf16=way.bf16), way)
                single = single or processes
                run = Run(processes, single)
                what = f"{graph.name}, {len(graph.graph.src):,} edges {repeat + 1}: {model}, {way.name}"
                if job.wire is None and not way.bf16 and not plan.ways[0].bf16:
                    _check_losses(run, what)
                results.runs.setdefault((model, way), []).append(run)
                print(f"{what}: {run.seconds:.3f} s an epoch, {run.rise / 1e6:.0f} MB at most", flush=True)
    return results


def _train(graph: Prepared, plan: Plan, job: Job, way: Way) -> list[Measurement]:
    target: Any = plan.worker if way.workers else measure.single
    file: Path = graph.partitions(way.workers, way.order) if way.workers else graph.file
    processes: list[Measurement] = run_workers(
        target,
        job,
        file,
        n_workers=way.workers or 1,
        n_threads=max(plan.threads // (way.workers or 1), 1),
        time_limit=plan.time_limit,
        host=plan.host,
    )
    return processes


def _check_losses(run: Run, what: str) -> None:
    """Check that a run's losses are those of the single process."""
    losses, expected = run.processes[0].losses, run.single[0].losses
    if losses and expected:  # neither ran out of memory
        worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        if not worst <= LOSS_TOLERANCE * max(map(abs, expected)):
            raise SarError(f"{what}: a loss differs by {worst:.2e} from that of one process; expected the same.")
