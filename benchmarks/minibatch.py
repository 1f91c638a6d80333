"""Mini-batches by this library's loader, DistDGL's, and DGL's in one process: `python -m benchmarks.minibatch`."""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import command, minibatch_training
from benchmarks.graphs import GeneratedSize, Prepared, prepare
from benchmarks.minibatch_training import Job, Measured
from benchmarks.report import MEGA, describe_setting, write_section
from benchmarks.results import read, save, setting
from benchmarks.summary import Spread
from examples.distdgl_cluster import ClusterError, run_cluster
from sar.errors import SarError
from sar.host.processes import run_workers
from sar.partition.inspect.text_tables import as_markdown, as_text

SAR, DISTDGL, SINGLE = "sar", "DistDGL", "DGL, 1 process"
LOADERS = SAR, DISTDGL, SINGLE
KEEPING = ", memory kept"
"""Ends the name of a loader whose processes keep freed memory."""

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


@dataclass(frozen=True)
class Run:
    """One training run; of several by the same loader `repeat` counts from 0. Servers: bytes at the peak."""

    loader: str
    repeat: int
    trainers: list[Measured]
    servers: list[int]


@dataclass(frozen=True)
class Results:
    """All runs; `graph` in words, `batch_size` of each trainer."""

    graph: str
    batch_size: int
    setting: dict[str, str]
    runs: list[Run] = field(default_factory=list)

    def of(self, loader: str) -> list[Run]:
        """The runs by one loader."""
        return [run for run in self.runs if run.loader == loader]

    @property
    def loaders(self) -> list[str]:
        """Those measured."""
        return list(dict.fromkeys(run.loader for run in self.runs))


def main(argv: Sequence[str]) -> None:
    """Measure, or read earlier results, and write the table."""
    arguments = _parser().parse_args(argv)
    with command.work_directory(arguments.work) as work:
        results = load(arguments.earlier) if arguments.earlier else _measure(argv, arguments, work)
    rows = table(results)
    print(f"\n{results.graph}\n{as_text(rows)}")
    text = results.graph, describe_setting(results.setting), as_markdown(rows)
    write_section(arguments.docs / "benchmarks.md", "minibatch", "\n\n".join(text))


def table(results: Results) -> list[tuple[str, ...]]:
    """Time and memory by loader; `HEADER` first."""
    rows: list[tuple[str, ...]] = [HEADER]
    for loader in results.loaders:
        runs = results.of(loader)
        others = results.of(DISTDGL + KEEPING if loader.endswith(KEEPING) else DISTDGL)
        beside = [(run, other) for run in runs for other in others if other.repeat == run.repeat]
        seconds = [_seconds(run) for run in runs]
        seeds = sum(trainer.seeds for trainer in runs[0].trainers)
        per_batch = [[1000 * value / run.trainers[0].batches for value in _shares(run)] for run in runs]
        fetching, computing = zip(*per_batch, strict=True)
        servers = [max(run.servers) / MEGA for run in runs if run.servers]
        rows.append(
            (
                loader,
                Spread.of(seconds).text(),
                Spread.of(_seconds(a) / _seconds(b) for a, b in beside).text() if beside else "",
                Spread.of(seeds / results.batch_size / value for value in seconds).text(1),
                f"{median(map(sum, per_batch)):.1f}",
                Spread.of(fetching).text(1),
                Spread.of(computing).text(1),
                f"{median(max(t.resident for t in run.trainers) for run in runs) / MEGA:.0f}",
                f"{median(servers):.0f}" if servers else "",
            )
        )
    return rows


def load(file: Path) -> Results:
    """Read what was measured, as `benchmarks.results.read` does."""
    return read(file, lambda found: Results(**found | {"runs": [_run(run) for run in found["runs"]]}))


def _run(run: dict[str, Any]) -> Run:
    return Run(**run | {"trainers": [Measured(**trainer) for trainer in run["trainers"]]})


def _seconds(run: Run) -> float:
    """The median epoch of the slowest trainer."""
    return max(median(trainer.seconds) for trainer in run.trainers)


def _shares(run: Run) -> tuple[float, float]:
    """Seconds of an epoch until batches are there, and of the rest; medians of the first trainer."""
    first = run.trainers[0]
    computing = (seconds - fetching for seconds, fetching in zip(first.seconds, first.fetching, strict=True))
    return median(first.fetching), median(computing)


# -- measuring


def _parser() -> argparse.ArgumentParser:
    size = GeneratedSize()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.minibatch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_paths(parser)
    parser.add_argument("--graph", default="rmat", metavar="NAME", help="(%(default)s)")
    parser.add_argument("--nodes", type=int, default=size.nodes, metavar="N", help="of the generated graph")
    parser.add_argument("--edges", type=int, default=size.edges, metavar="N", help="of the generated graph")
    parser.add_argument("--features", type=int, default=size.features, metavar="F", help="where random (%(default)s)")
    parser.add_argument("--loaders", nargs="+", choices=LOADERS, default=list(LOADERS), help="(all)")
    parser.add_argument(
        "--memory",
        nargs="+",
        choices=("default", "kept"),
        default=["default"],
        help="sar's default allocator beside DGL's, `Config.allocator = 'kept'` in all trainers, or both (%(default)s)",
    )
    parser.add_argument("--workers", type=int, default=2, metavar="W", help="trainers, and threads alone (%(default)s)")
    parser.add_argument("--samplers", type=int, default=0, metavar="N", help="num_workers of a trainer (%(default)s)")
    parser.add_argument("--fanouts", type=int, nargs=3, default=[15, 10, 5], metavar="K", help="(15 10 5)")
    parser.add_argument("--batch-size", type=int, default=1000, metavar="N", help="of a trainer (%(default)s)")
    parser.add_argument("--epochs", type=int, default=4, metavar="N", help="that are timed, after one (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="of every run (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of graph, split and parameters (%(default)s)")
    parser.add_argument("--time-limit", type=float, default=600, metavar="S", help="for one run (%(default)s)")
    parser.add_argument("--from", type=Path, dest="earlier", metavar="FILE", help="write minibatch.json anew")
    return parser


def _measure(argv: Sequence[str], arguments: argparse.Namespace, work: Path) -> Results:
    """Measure everything; results are saved after each run."""
    size = GeneratedSize(arguments.nodes, arguments.edges, arguments.features)
    graph = prepare(arguments.graph, size, arguments.data, work, arguments.seed)
    job = Job(
        num_classes=graph.num_classes,
        fanouts=arguments.fanouts,
        batch_size=arguments.batch_size,
        trainers=arguments.workers,
        samplers=arguments.samplers,
        epochs=arguments.epochs,
        learning_rate=0.01,
        seed=arguments.seed,
    )
    shown = command.shown("benchmarks.minibatch", argv)
    results = Results(_words(graph), job.batch_size, setting(shown, _options(job, arguments)))
    endings = [KEEPING if memory == "kept" else "" for memory in arguments.memory]
    jobs = {loader + ending: job for ending in endings for loader in arguments.loaders}
    for run in _run_all(graph, jobs, arguments):
        results.runs.append(run)
        print(f"{graph.name} {run.repeat + 1}: {run.loader}: {_seconds(run):.3f} s an epoch", flush=True)
        save(results, work / "minibatch.json")
    return results


def _run_all(graph: Prepared, jobs: dict[str, Job], arguments: argparse.Namespace) -> Iterator[Run]:
    """Every loader once, then again for each repeat, with other seeds."""
    for repeat in range(arguments.repeats):
        for loader, job in jobs.items():
            yield _train(loader, replace(job, seed=job.seed + repeat), graph, repeat, arguments.time_limit)


def _train(loader: str, job: Job, graph: Prepared, repeat: int, time_limit: float) -> Run:
    """A run of a loader, whose name says what allocator it has."""
    kind = loader.removesuffix(KEEPING)
    default = "system" if kind in (DISTDGL, SINGLE) else "auto"
    job = replace(job, allocator="kept" if loader.endswith(KEEPING) else default)
    if kind == DISTDGL:
        trainers, servers = _cluster(job, graph, time_limit)
        return Run(loader, repeat, trainers, servers)
    targets: dict[str, tuple[Callable[..., Measured], int, Path]] = {
        SINGLE: (minibatch_training.single, 1, graph.file),
        SAR: (minibatch_training.worker, job.trainers, graph.partitions(job.trainers)),
    }
    target, processes, file = targets[kind]
    trainers = run_workers(
        target,
        job,
        file,
        n_workers=processes,
        n_threads=job.trainers // processes,
        time_limit=time_limit,
    )
    return Run(loader, repeat, trainers, [])


def _cluster(job: Job, graph: Prepared, time_limit: float) -> tuple[list[Measured], list[int]]:
    """What the trainers of DistDGL measured, one on each machine, and the servers' bytes at the peak."""
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
        return [Measured(**json.loads(file.read_text())) for file in files], usage.servers


def _words(graph: Prepared) -> str:
    data = graph.data
    return (
        f"**{graph.name}**: {data.total_nodes:,} nodes, {data.total_edges:,} edges with self-loops, "
        f"{graph.num_features:,} features, {graph.num_classes} classes."
    )


def _options(job: Job, arguments: argparse.Namespace) -> dict[str, str]:
    """What the numbers depend on, in words."""
    batches = f"fan-outs {job.fanouts}, {job.batch_size:,} seeds of each of {job.trainers} trainers of 1 thread"
    return {"batches": f"{batches}, {job.samplers} samplers", "repeats": str(arguments.repeats)}


if __name__ == "__main__":
    command.run_main(main)
