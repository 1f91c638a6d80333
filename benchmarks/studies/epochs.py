"""Seconds of an epoch on the parts of each partition method: `python -m benchmarks.studies epochs`.

Parts are balanced by nodes and in-edges, whatever the method, and trained on by as many workers of one thread each.
Each repeat goes through all methods, so that all see the same machine.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks import command, measure
from benchmarks.edge_partitioners import method_named, method_names
from benchmarks.graphs import GeneratedSize, Prepared, prepare
from benchmarks.measure import Job
from benchmarks.models import MODELS
from benchmarks.report import MEGA, by_graph, describe_setting, write_section
from benchmarks.results import Run, setting
from benchmarks.studies.quality import measure_quality
from benchmarks.summary import Spread, seconds
from sar.host.processes import run_workers
from sar.partition.assign.assigning import AUTO, IN_EDGES, balance_weights
from sar.partition.assign.task import AssignmentTask
from sar.partition.ingest.objects import from_object
from sar.partition.inspect.text_tables import as_markdown, as_text
from sar.partition.write.write import write_partitions

GRAPHS = "rmat", "soc_epinions", "amazon_computers"
HEADER = ("graph", "method", "replication", "model", "s / epoch", "MB sent", "s waited")


@dataclass
class Row:
    """One model on one graph and one method's parts; times of all repeats.

    replication: (nodes + halo nodes of all parts) / nodes.
    seconds: of the median epoch of the slowest worker.
    waited: seconds an epoch of the worker that waits most.
    sent: bytes that the busiest worker sends an epoch.
    """

    graph: str
    method: str
    replication: float
    model: str
    seconds: list[float]
    waited: list[float]
    sent: float = 0.0


def main(argv: Sequence[str]) -> None:
    """Measure, and write the table."""
    size = GeneratedSize()
    methods = [name for name in method_names() if name != AUTO]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies epochs", description=__doc__)
    command.add_paths(parser)
    parser.add_argument("--graphs", nargs="+", default=GRAPHS, metavar="NAME", help="(%(default)s)")
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods, metavar="NAME", help="(all)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["SAGE"], help="(%(default)s)")
    parser.add_argument("--workers", type=int, default=4, metavar="W", help="and parts (%(default)s)")
    parser.add_argument("--epochs", type=int, default=5, metavar="N", help="that are timed, after 2 (%(default)s)")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="of every run (%(default)s)")
    parser.add_argument("--nodes", type=int, default=size.nodes, metavar="N", help="of the generated graph")
    parser.add_argument("--edges", type=int, default=size.edges, metavar="N", help="of the generated graph")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random (%(default)s)")
    parser.add_argument("--time-limit", type=float, default=600, metavar="S", help="for one run (%(default)s)")
    arguments = parser.parse_args(argv)
    with command.work_directory(arguments.work) as work:
        rows = _measure_all(arguments, work)
    runs = f"{arguments.workers} workers of 1 thread; {arguments.repeats} interleaved, median (min-max)"
    options = {"runs": f"{runs}; {arguments.epochs} epochs each after 2 to warm up"}
    conditions = setting(command.shown("benchmarks.studies", ["epochs", *argv]), options)
    cells = table(rows)
    print(f"\n{as_text(cells)}")
    lines = by_graph(rows, ("method", "model"), "s / epoch, MB sent", _short)
    section = f"{describe_setting(conditions)}\n\n{as_markdown(lines)}"
    write_section(arguments.docs / "benchmarks.md", "epoch of methods", section)


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A line for each row, medians of the repeats with least and greatest; `HEADER` first."""
    cells: list[tuple[str, ...]] = [HEADER]
    for row in rows:
        took = Spread.of(row.seconds).text(), f"{row.sent / MEGA:.1f}", f"{median(row.waited):.2f}"
        cells.append((row.graph, row.method, f"{row.replication:.2f}", row.model, *took))
    return cells


def _short(row: Row) -> str:
    return f"{Spread.of(row.seconds).text()}, {row.sent / MEGA:.1f}"


def _measure_all(arguments: argparse.Namespace, work: Path) -> list[Row]:
    """Measure every method on every graph."""
    rows: list[Row] = []
    for name in arguments.graphs:
        size = GeneratedSize(arguments.nodes, arguments.edges)
        graph = prepare(name, size, arguments.data, work, arguments.seed)
        parts = {method: divide(graph, method, arguments.workers, arguments.seed) for method in arguments.methods}
        of_graph = [
            Row(graph.name, method, factor, model, [], [])
            for model in arguments.models
            for method, (_, factor) in parts.items()
        ]
        rows += of_graph
        for _ in range(arguments.repeats):
            for row in of_graph:
                job = Job(row.model, graph.num_classes, 2, arguments.epochs, 0.01, arguments.seed)
                _train(row, job, parts[row.method][0], arguments)
                print(" ".join(table([row])[-1]), flush=True)
    return rows


def divide(graph: Prepared, method: str, num_parts: int, seed: int) -> tuple[Path, float]:
    """A method's parts of a graph in its folder, made if they are not there, and their replication factor."""
    source = from_object(graph.data)
    with tempfile.TemporaryDirectory() as scratch:
        weights = balance_weights(source, [IN_EDGES])
        part_of = method_named(method)(AssignmentTask(source, num_parts, Path(scratch), seed, weights))
    folder = graph.folder / f"{method}-{num_parts}"
    if not folder.exists():
        write_partitions(source, part_of, num_parts, folder, "graph", method=method)
    return folder / "graph.json", measure_quality(source, part_of, num_parts).replication_factor


def _train(row: Row, job: Job, json_file: Path, arguments: argparse.Namespace) -> None:
    workers, limit = arguments.workers, arguments.time_limit
    processes = run_workers(measure.worker, job, json_file, n_workers=workers, n_threads=1, time_limit=limit)
    row.seconds.append(seconds(Run(job.model, workers, job.mode, 0, processes)))
    traffic = [process.traffic for process in processes if process.traffic]
    row.waited.append(max(one.waited for one in traffic))
    row.sent = max(one.sent for one in traffic)
