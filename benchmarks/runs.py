"""Runs the rows of a benchmark in processes of their own, interleaved with single-process DGL."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import measure, summary
from benchmarks.graphs import Prepared
from benchmarks.measure import Job, Measurement
from benchmarks.results import SINGLE, Results, Run, save
from sar.errors import SarError
from sar.host.processes import run_workers

LOSS_TOLERANCE = 2e-3
"""Of a loss, relative: rounding drifts apart while training, a wrong exchange shows at once."""

Target = Callable[[Callable[[Any], None], Job, Path], Measurement]


@dataclass(frozen=True)
class Plan:
    """What to measure on a graph.

    job: settings that all rows share; its model, classes and mode are set for each.
    threads: of single-process DGL, and of all workers together, but at least one each.
    time_limit: seconds for one run.
    worker: what a worker process runs.
    host: the address at which workers find each other.
    """

    models: Sequence[str]
    workers: Sequence[int]
    modes: Sequence[int]
    repeats: int
    job: Job
    threads: int
    time_limit: float
    worker: Target = measure.worker
    host: str = "127.0.0.1"


def run_all(graph: Prepared, plan: Plan, setting: dict[str, str]) -> Iterator[Results]:
    """Measure every row once, then again for each repeat; yields the results so far after each run.

    Raises:
        SarError: a run failed, or its losses are not those of single-process DGL.
    """
    data, runs = graph.data, list[Run]()
    results = Results(
        graph.name, data.total_nodes, data.total_edges, graph.num_features, graph.num_classes, setting, runs
    )
    for repeat in range(plan.repeats):
        for model in plan.models:
            job = replace(plan.job, model=model, num_classes=graph.num_classes)
            alone = _single(graph, plan, job, repeat)
            runs.append(alone)
            yield results
            for workers in plan.workers:
                for mode in plan.modes:
                    run = _workers(graph, plan, replace(job, mode=mode), workers, repeat)
                    _check_losses(run, alone, job)
                    runs.append(run)
                    yield results


def measure_each(graphs: Iterable[Prepared], plan: Plan, setting: dict[str, str], results_file: Path) -> list[Results]:
    """Measure on every graph, with a line printed and all results saved after each run."""
    done: list[Results] = []
    for graph in graphs:
        for results in run_all(graph, plan, setting):
            print(f"{graph.name}, {graph.data.total_edges:,} edges {describe(results.runs[-1])}", flush=True)
            save([*done, results], results_file)
        done.append(results)
    return done


def describe(run: Run) -> str:
    """One line about a run."""
    who = "DGL" if run.workers == SINGLE else f"sar, W = {run.workers}, mode {run.mode}"
    rise = max(process.rise for process in run.processes) / 1e6
    return f"{run.repeat + 1}: {run.model}, {who}: {summary.seconds(run):.3f} s an epoch, {rise:.0f} MB at most"


def threads_each(threads: int, workers: int) -> int:
    """Of each worker, where all together have those of one process: at least one."""
    return max(threads // workers, 1)


def _single(graph: Prepared, plan: Plan, job: Job, repeat: int) -> Run:
    processes = run_workers(
        measure.single, job, graph.file, n_workers=1, n_threads=plan.threads, time_limit=plan.time_limit
    )
    return Run(job.model, SINGLE, 0, repeat, processes)


def _workers(graph: Prepared, plan: Plan, job: Job, workers: int, repeat: int) -> Run:
    processes = run_workers(
        plan.worker,
        job,
        graph.partitions(workers),
        n_workers=workers,
        n_threads=threads_each(plan.threads, workers),
        time_limit=plan.time_limit,
        host=plan.host,
    )
    return Run(job.model, workers, job.mode, repeat, processes)


def _check_losses(run: Run, alone: Run, job: Job) -> None:
    """Refuse to report a run that computed something else."""
    difference = summary.loss_difference(run, alone)
    if job.wire is None and not difference <= LOSS_TOLERANCE * max(map(abs, alone.processes[0].losses)):
        raise SarError(
            f"{describe(run)}: a loss differs by {difference:.2e} from that of single-process DGL; expected the same."
        )
