"""Mini-batches from the loaders of sar, DistDGL and DGL in one process: `python -m benchmarks.minibatch`."""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks import command, minibatch_training
from benchmarks.graphs import Prepared, prepare
from benchmarks.minibatch_training import Job, Measured
from benchmarks.report import MEGA, publish, setting
from benchmarks.runs import Spread
from examples.distdgl_cluster import ClusterError, run_cluster
from sar.errors import SarError
from sar.host.processes import run_workers

SAR, DISTDGL, SINGLE = "sar", "DistDGL", "DGL, 1 process"
LOADERS = SAR, DISTDGL, SINGLE

HEADER = (
    "batches from",
    "s / epoch",
    "/ DistDGL",
    "batches / s",
    "ms a batch",
    "fetching",
    "computing",
    "MB of a trainer",
    "MB of a server",
)


class Run(NamedTuple):
    """One training run, and the peak memory of its servers in bytes."""

    trainers: list[Measured]
    servers: list[int]

    @property
    def seconds(self) -> float:
        """The median epoch of the slowest trainer."""
        return max(median(trainer.seconds) for trainer in self.trainers)

    @property
    def seeds(self) -> int:
        return sum(trainer.seeds for trainer in self.trainers)


def main(argv: Sequence[str]) -> None:
    """Run the benchmark, and write the table."""
    parser = command.new_parser("benchmarks.minibatch", __doc__)
    parser.add_argument("--graph", default="rmat", metavar="NAME", help="(%(default)s)")
    parser.add_argument("--loaders", nargs="+", choices=LOADERS, default=list(LOADERS), help="(all)")
    parser.add_argument("--workers", type=int, default=2, metavar="W", help="trainers, or threads of DGL (%(default)s)")
    parser.add_argument("--samplers", type=int, default=0, metavar="N", help="num_workers of trainers (%(default)s)")
    parser.add_argument("--fanouts", type=int, nargs=3, default=[15, 10, 5], metavar="K", help="(15 10 5)")
    parser.add_argument("--batch-size", type=int, default=1000, metavar="N", help="of each trainer (%(default)s)")
    parser.add_argument("--epochs", type=int, default=4, metavar="N", help="timed epochs, after one (%(default)s)")
    arguments = parser.parse_args(argv)
    batches = f"fan-outs {arguments.fanouts}, {arguments.batch_size:,} seeds of each of {arguments.workers} trainers"
    options = {"batches": f"{batches} of 1 thread, {arguments.samplers} samplers", "repeats": str(arguments.repeats)}
    conditions = setting(command.shown("benchmarks.minibatch", argv), options)
    runs: dict[str, list[Run]] = {loader: [] for loader in arguments.loaders}
    with command.work_directory(arguments.work) as work:
        graph = prepare(arguments.graph, command.size_of(arguments), arguments.data, work, arguments.seed)
        for repeat in range(arguments.repeats):  # all loaders once, then again with other seeds
            for loader in arguments.loaders:
                run = _train(loader, _job(arguments, graph, repeat), graph, arguments.time_limit)
                runs[loader].append(run)
                print(f"{graph.name} {repeat + 1}: {loader}: {run.seconds:.3f} s an epoch", flush=True)
    rows = table(runs, arguments.batch_size)
    publish(arguments.docs / "benchmarks.md", "minibatch", f"{graph.words()}\n\n{conditions}", rows)


def table(runs: dict[str, list[Run]], batch_size: int) -> list[tuple[str, ...]]:
    """Rows of time and memory by loader, after `HEADER`."""
    rows: list[tuple[str, ...]] = [HEADER]
    for loader, own in runs.items():
        pairs = zip(own, runs[DISTDGL], strict=True) if DISTDGL in runs else ()
        over = [run.seconds / other.seconds for run, other in pairs]
        per_batch = [[1000 * value / run.trainers[0].batches for value in _shares(run)] for run in own]
        fetching, computing = zip(*per_batch, strict=True)
        servers = [max(run.servers) / MEGA for run in own if run.servers]
        rows.append(
            (
                loader,
                Spread.of(run.seconds for run in own).text(),
                Spread.of(over).text() if over else "",
                Spread.of(run.seeds / batch_size / run.seconds for run in own).text(1),
                f"{median(map(sum, per_batch)):.1f}",
                Spread.of(fetching).text(1),
                Spread.of(computing).text(1),
                f"{median(max(trainer.resident for trainer in run.trainers) for run in own) / MEGA:.0f}",
                f"{median(servers):.0f}" if servers else "",
            )
        )
    return rows


def _shares(run: Run) -> tuple[float, float]:
    """Seconds of an epoch spent waiting for batches, and the rest; medians of the first trainer."""
    first = run.trainers[0]
    computing = (seconds - fetching for seconds, fetching in zip(first.seconds, first.fetching, strict=True))
    return median(first.fetching), median(computing)


def _job(arguments: argparse.Namespace, graph: Prepared, repeat: int) -> Job:
    return Job(
        num_classes=graph.num_classes,
        fanouts=arguments.fanouts,
        batch_size=arguments.batch_size,
        trainers=arguments.workers,
        samplers=arguments.samplers,
        epochs=arguments.epochs,
        seed=arguments.seed + repeat,
    )


def _train(loader: str, job: Job, graph: Prepared, time_limit: float) -> Run:
    """Run a loader with its library's default allocator."""
    if loader == DISTDGL:
        return _cluster(job, graph, time_limit)
    target: Callable[..., Measured] = minibatch_training.worker if loader == SAR else minibatch_training.single
    processes = job.trainers if loader == SAR else 1
    trainers = run_workers(
        target,
        replace(job, allocator="auto") if loader == SAR else job,
        graph.partitions(job.trainers) if loader == SAR else graph.file,
        n_workers=processes,
        n_threads=job.trainers // processes,
        time_limit=time_limit,
    )
    return Run(trainers, [])


def _cluster(job: Job, graph: Prepared, time_limit: float) -> Run:
    """DistDGL's trainers, one per machine, and their servers."""
    with tempfile.TemporaryDirectory(prefix="sar-distdgl-") as name:
        folder = Path(name)
        (folder / "job").write_text(json.dumps(asdict(job)))
        script = ["-m", "benchmarks.minibatch_training", str(folder / "job"), name]
        partitions = graph.partitions(job.trainers)
        try:
            usage = run_cluster(script, partitions, samplers=job.samplers, time_limit=time_limit, quiet=True)
        except ClusterError as error:
            raise SarError(f"DistDGL failed: {error}") from error
        files = (folder / f"{rank}.json" for rank in range(job.trainers))
        return Run([Measured(**json.loads(file.read_text())) for file in files], usage.servers)


if __name__ == "__main__":
    command.run_main(main)
