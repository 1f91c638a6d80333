"""Partition methods side by side, each in a process of its own: `python -m benchmarks.partitioning`."""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks import command
from benchmarks.edge_files import GeneratedEdges, graph_of, prepare
from benchmarks.plots import draw_partitioning
from benchmarks.quality import measure_quality
from benchmarks.report import MEGA, by_graph, describe_setting, write_section
from benchmarks.results import read, save, setting
from sar.adapters.dgl.shim import require_dgl
from sar.cli.demo import community_graph
from sar.data.arrays import Array
from sar.errors import ConfigError
from sar.host.memory import PeakMemory
from sar.host.processes import run_workers
from sar.partition.assign.assigning import IN_EDGES, METHODS, balance_weights, method_named
from sar.partition.assign.task import AssignmentTask, Method
from sar.partition.inspect.text_tables import as_markdown, as_text

GENERATED = "sbm", "rmat"
REAL = "soc_epinions", "web_notredame", "mesh_wing"
READING, DGL = "reading", "dgl"
"""Rows that are no methods: reading the edges once, and `dgl.metis_partition_assignment` on a graph in memory."""
BALANCES = "nodes", "edges"
"""What is kept equal: the number of nodes, or that of nodes and of edges into them."""
PICTURE = "benchmarks-partitioning.png"
HEADER = (
    "graph",
    "method",
    "balanced",
    "seconds",
    "MB at peak",
    "edge cut",
    "replication",
    "nodes, max / mean",
    "in-edges, max / mean",
)


@dataclass(frozen=True)
class Job:
    """One run: a method on a graph.

    edges: file of the graph.
    balance: one of `BALANCES`.
    """

    graph: str
    edges: Path
    num_nodes: int
    method: str
    balance: str
    num_parts: int
    seed: int


@dataclass(frozen=True)
class Row:
    """What a run took and gave; seconds and peaks of all repeats.

    peaks: bytes of resident memory above the level before the run, with libraries and kernels loaded.
    edge_cut, replication, nodes, in_edges: as `benchmarks.quality.Quality`; None for `READING`.
    """

    graph: str
    method: str
    balance: str
    seconds: list[float]
    peaks: list[int]
    edge_cut: float | None = None
    replication: float | None = None
    nodes: float | None = None
    in_edges: float | None = None


def main(argv: Sequence[str]) -> None:
    """Measure, or read earlier results, and write the table and the picture."""
    size = GeneratedEdges()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.partitioning", description=__doc__)
    command.add_paths(parser)
    command.add_graphs(parser, "--graphs", GENERATED, REAL)
    parser.add_argument(
        "--methods", nargs="+", default=all_methods(), metavar="NAME", help="default: all, dgl and reading"
    )
    parser.add_argument("--balance", nargs="+", choices=BALANCES, default=list(BALANCES), help="(both)")
    parser.add_argument("--parts", type=int, default=4, metavar="P", help="(%(default)s)")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="of every run (%(default)s)")
    parser.add_argument("--nodes", type=int, default=size.nodes, metavar="N", help="of generated graphs")
    parser.add_argument("--edges", type=int, default=size.edges, metavar="N", help="of generated graphs")
    parser.add_argument("--communities", type=int, default=size.communities, metavar="N", help="of sbm (%(default)s)")
    parser.add_argument("--homophily", type=float, default=size.homophily, metavar="SHARE", help="of sbm (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of graphs and methods (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of each process (%(default)s)")
    parser.add_argument("--time-limit", type=float, default=900, metavar="S", help="for one run (%(default)s)")
    parser.add_argument("--from", type=Path, dest="earlier", metavar="FILE", help="write partitioning.json anew")
    arguments = parser.parse_args(argv)
    with command.work_directory(arguments.work) as work:
        conditions, rows = _load(arguments.earlier) if arguments.earlier else _measure_all(argv, arguments, work)
    cells = table(rows)
    print(f"\n{as_text(cells)}")
    arguments.docs.mkdir(parents=True, exist_ok=True)
    draw_partitioning([_bar(row) for row in rows if row.edge_cut is not None], arguments.docs / PICTURE)
    picture = f"![Edge cut, time and memory of each method]({PICTURE})"
    parts = describe_setting(conditions), as_markdown(by_method(rows)), picture
    write_section(arguments.docs / "benchmarks.md", "partitioning", "\n\n".join(parts))


def all_methods() -> list[str]:
    """What can be measured."""
    return [READING, DGL, *(name for name in METHODS if name != "metis")]  # another name of multilevel


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A line for each row, medians of the repeats; `HEADER` first."""
    cells: list[tuple[str, ...]] = [HEADER]
    for row in rows:
        took = f"{median(row.seconds):.2f}", f"{median(row.peaks) / MEGA:.0f}"
        gave = "" if row.edge_cut is None else f"{100 * row.edge_cut:.1f} %"
        others = ("" if value is None else f"{value:.2f}" for value in (row.replication, row.nodes, row.in_edges))
        cells.append((row.graph, row.method, row.balance, *took, gave, *others))
    return cells


def by_method(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A line for each method and balance, with a column for each graph: seconds, MB at peak, edge cut."""
    (_, _, *graphs), *lines = by_graph(rows, ("method", "balance"), "s, MB, cut", _short)
    header = "method", "balanced", *graphs, "largest part / mean"
    return [header, *((*line, _largest(rows, *line[:2])) for line in lines)]


def _largest(rows: Sequence[Row], method: str, balance: str) -> str:
    """Of what a method keeps equal, the largest part over the mean, on the worst graph."""
    of_method = [row for row in rows if (row.method, row.balance) == (method, balance)]
    sizes = [row.nodes if balance == "nodes" else row.in_edges for row in of_method]
    largest = max((size for size in sizes if size is not None), default=None)
    return "" if largest is None else f"{largest:.2f}"


def _short(row: Row) -> str:
    cut = "" if row.edge_cut is None else f", {100 * row.edge_cut:.1f} %"
    return f"{median(row.seconds):.2f}, {median(row.peaks) / MEGA:.0f}{cut}"


def measure(_: Callable[[Any], None], job: Job) -> Row:
    """Run one method in this process."""
    graph = graph_of(job.edges, job.num_nodes)
    weights = balance_weights(graph, [IN_EDGES] if job.balance == "edges" else [])
    run = _runner(job)
    _load_code(run)
    with tempfile.TemporaryDirectory(dir=job.edges.parent) as scratch:
        task = AssignmentTask(graph, job.num_parts, Path(scratch), job.seed, weights)
        memory, start = PeakMemory(), time.perf_counter()
        part_of = run(task)
        seconds, rise = time.perf_counter() - start, memory.above_baseline()
    taken = job.graph, job.method, job.balance, [seconds], [rise]
    if job.method == READING:
        return Row(*taken)
    quality = measure_quality(graph, part_of, job.num_parts)
    balance = quality.balance
    return Row(*taken, quality.edge_cut, quality.replication_factor, balance["nodes"], balance["in_edges"])


def _runner(job: Job) -> Method:
    if job.method == DGL:
        require_dgl()
        return lambda task: _by_dgl(task, job.balance == "edges")
    return _read if job.method == READING else method_named(job.method)


def _read(task: AssignmentTask) -> Array:
    for _ in task.graph.chunks():
        pass
    return np.empty(0, np.int32)


def _by_dgl(task: AssignmentTask, balance_edges: bool) -> Array:
    dgl = require_dgl()
    ends = tuple(torch.from_numpy(np.concatenate(ids)) for ids in zip(*task.graph.chunks(), strict=True))
    graph = dgl.graph(ends, num_nodes=task.graph.total_nodes)
    part_of: Array = dgl.metis_partition_assignment(graph, task.num_parts, balance_edges=balance_edges).numpy()
    return part_of


def _load_code(run: Method) -> None:
    """Run on a small graph, with so little memory that all stages of the method are gone through."""
    graph = community_graph(2000, 40_000, num_features=1)
    for memory in (None, 2**18):
        with tempfile.TemporaryDirectory() as scratch, suppress(ConfigError):  # METIS takes more
            run(AssignmentTask(graph, 2, Path(scratch), weights=balance_weights(graph, [IN_EDGES]), memory=memory))


def _measure_all(argv: Sequence[str], arguments: argparse.Namespace, work: Path) -> tuple[dict[str, str], list[Row]]:
    """Measure every method on every graph; results are saved after each run."""
    unknown = sorted(set(arguments.methods) - {*all_methods()})
    if unknown:
        raise ConfigError(f"there are no methods {unknown}; expected some of {', '.join(all_methods())}.")
    size = GeneratedEdges(arguments.nodes, arguments.edges, arguments.communities, arguments.homophily)
    words = f"each run in a process of its own, {arguments.threads} threads; {arguments.repeats} repeats, median"
    generated = ", ".join(f"{key} {value:,}" for key, value in vars(size).items())
    options = {"runs": words, "parts": str(arguments.parts), "generated graphs": generated}
    conditions = setting(command.shown("benchmarks.partitioning", argv), options)
    rows: list[Row] = []
    for name in command.graphs_of(arguments.graphs, GENERATED, REAL, arguments.data):
        edges, num_nodes = prepare(name, size, arguments.data, work, arguments.seed)
        for method in arguments.methods:
            for balance in arguments.balance if method != READING else [""]:
                job = Job(Path(name).stem, edges, num_nodes, method, balance, arguments.parts, arguments.seed)
                rows.append(_repeat(job, arguments))
                print(" ".join(table(rows)[-1]), flush=True)
                save({"setting": conditions, "rows": rows}, work / "partitioning.json")
    return conditions, rows


def _repeat(job: Job, arguments: argparse.Namespace) -> Row:
    runs: list[Row] = [
        run_workers(measure, job, n_workers=1, n_threads=arguments.threads, time_limit=arguments.time_limit)[0]
        for _ in range(arguments.repeats)
    ]
    lists = {key: [value for run in runs for value in getattr(run, key)] for key in ("seconds", "peaks")}
    return Row(**asdict(runs[0]) | lists)


def _bar(row: Row) -> dict[str, Any]:
    """A row's place and heights in the picture."""
    return asdict(row) | {"seconds": median(row.seconds), "megabytes": median(row.peaks) / MEGA}


def _load(file: Path) -> tuple[dict[str, str], list[Row]]:
    return read(file, lambda content: (content["setting"], [Row(**row) for row in content["rows"]]))


if __name__ == "__main__":
    command.run_main(main)
