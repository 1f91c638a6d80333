"""Compares partition methods, each in a separate process: `python -m benchmarks.partitioning`."""

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

import sar
from benchmarks import command
from benchmarks.edge_files import GeneratedEdges, prepare
from benchmarks.plots import draw_bars
from benchmarks.quality import measure_quality
from benchmarks.report import MEGA, publish, setting
from sar.adapters.dgl.shim import require_dgl
from sar.cli.demo import community_graph
from sar.data.arrays import Array
from sar.errors import ConfigError
from sar.host.memory import PeakMemory
from sar.host.processes import run_workers
from sar.partition.assign.assigning import IN_EDGES, AssigningOptions, assign
from sar.partition.graph_source import GraphSource

GRAPHS = "sbm", "rmat", "soc_epinions", "web_notredame", "mesh_wing"
READING, DGL = "reading", "dgl"
"""Rows that are no methods: reading the edges once, and `dgl.metis_partition_assignment` on a graph in memory."""
METHODS = READING, DGL, "random", "spring", "ldg", "multilevel"
BALANCES = "nodes", "edges"
"""What is kept equal: the number of nodes, or that of nodes and of edges into them."""
PICTURE = "benchmarks-partitioning.png"


@dataclass(frozen=True)
class Job:
    """One run: a method on the graph of a file of edges."""

    edges: Path
    num_nodes: int
    method: str
    balance: str  # one of `BALANCES`
    num_parts: int
    seed: int


class Row(NamedTuple):
    """Results of a run."""

    seconds: float
    peak: float  # peak resident memory in bytes, above the level with libraries and kernels loaded
    edge_cut: float | None = None
    largest: float | None = None  # largest partition / mean, in the balanced quantity


def main(argv: Sequence[str]) -> None:
    """Run the benchmark, and write the table and the picture."""
    size = GeneratedEdges()
    parser = command.new_parser("benchmarks.partitioning", __doc__, repeats=1)
    parser.set_defaults(nodes=size.nodes, edges=size.edges)
    parser.add_argument("--graphs", nargs="+", metavar="NAME", help=f"default: of {', '.join(GRAPHS)} those in --data")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="(all)")
    parser.add_argument("--balance", nargs="+", choices=BALANCES, default=BALANCES, help="(both)")
    parser.add_argument("--parts", type=int, default=4, metavar="P", help="(%(default)s)")
    parser.add_argument("--communities", type=int, default=size.communities, metavar="N", help="of sbm (%(default)s)")
    parser.add_argument("--homophily", type=float, default=size.homophily, metavar="SHARE", help="of sbm (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of each process (%(default)s)")
    arguments = parser.parse_args(argv)
    size = GeneratedEdges(arguments.nodes, arguments.edges, arguments.communities, arguments.homophily)
    words = f"each run in a separate process, {arguments.threads} threads; {arguments.repeats} repeats, median"
    generated = ", ".join(f"{key} {value:,}" for key, value in vars(size).items())
    options = {"runs": words, "parts": str(arguments.parts), "generated graphs": generated}
    conditions = setting(command.shown("benchmarks.partitioning", argv), options)
    there = [name for name in GRAPHS if name in ("sbm", "rmat") or (arguments.data / f"{name}.npz").exists()]
    found: dict[tuple[str, str], dict[str, Row]] = {}  # by method and balance, then graph
    with command.work_directory(arguments.work) as work:
        for name in arguments.graphs or there:
            edges, num_nodes = prepare(name, size, arguments.data, work, arguments.seed)
            for method in arguments.methods:
                for balance in arguments.balance if method != READING else ("",):
                    job = Job(edges, num_nodes, method, balance, arguments.parts, arguments.seed)
                    row = _repeat(job, arguments.repeats, arguments.threads, arguments.time_limit)
                    found.setdefault((method, balance), {})[Path(name).stem] = row
                    print(name, method, balance, cell(row), flush=True)
    draw_bars(bars(found), arguments.docs / PICTURE)
    picture = f"![Edge cut, time and memory of each method]({PICTURE})"
    publish(arguments.docs / "benchmarks.md", "partitioning", conditions, table(found), picture)


def table(found: dict[tuple[str, str], dict[str, Row]]) -> list[tuple[str, ...]]:
    """Rows by method and balance, with a column for each graph; the header comes first."""
    graphs = list(next(iter(found.values())))
    header = "method", "balanced", *(f"{graph}: s, MB, cut" for graph in graphs), "largest part / mean"
    rows: list[tuple[str, ...]] = [header]
    for key, by_graph in found.items():
        worst = max((row.largest for row in by_graph.values() if row.largest is not None), default=None)
        rows.append((*key, *(cell(by_graph[graph]) for graph in graphs), "" if worst is None else f"{worst:.2f}"))
    return rows


def cell(row: Row) -> str:
    """Seconds, MB and edge cut."""
    cut = "" if row.edge_cut is None else f", {100 * row.edge_cut:.1f} %"
    return f"{row.seconds:.2f}, {row.peak / MEGA:.0f}{cut}"


def bars(found: dict[tuple[str, str], dict[str, Row]]) -> dict[str, dict[str, dict[str, float]]]:
    """Values by graph, quantity, and method with balance."""
    columns: dict[str, dict[str, dict[str, float]]] = {}
    for (method, balance), by_graph in found.items():
        for graph, row in by_graph.items():
            values = {"share of edges cut": row.edge_cut or 0, "seconds": row.seconds, "MB": row.peak / MEGA}
            for quantity, value in values.items() if method != READING else ():
                columns.setdefault(graph, {}).setdefault(quantity, {})[f"{method}, {balance}"] = value
    return columns


def measure(_: Callable[[Any], None], job: Job) -> Row:
    """Run one method in this process."""
    with tempfile.TemporaryDirectory(dir=job.edges.parent) as scratch:
        graph = sar.open_graph(job.edges, scratch, num_nodes=job.num_nodes)
        small = community_graph(2000, 40_000, num_features=1)
        for limit in (None, 2**18):  # little memory makes a method run all its stages, which loads their code
            with suppress(ConfigError):  # METIS needs more
                _run(job, small, Path(scratch) / "small", limit)
        memory, start = PeakMemory(), time.perf_counter()
        part_of = _run(job, graph, Path(scratch) / "method")
        seconds, rise = time.perf_counter() - start, memory.above_baseline()
        if job.method == READING:
            return Row(seconds, rise)
        quality = measure_quality(graph, part_of, job.num_parts)
    return Row(seconds, rise, quality.edge_cut, quality.balance["nodes" if job.balance == "nodes" else "in_edges"])


def _run(job: Job, graph: GraphSource, scratch: Path, memory: int | None = None) -> Array:
    """The partition of every node."""
    if job.method == READING:
        for _ in graph.chunks():
            pass
        return np.empty(0, np.int32)
    if job.method == DGL:
        ends = tuple(map(torch.from_numpy, graph.ends()))
        whole = require_dgl().graph(ends, num_nodes=graph.total_nodes)
        balance_edges = job.balance == "edges"
        part_of = require_dgl().metis_partition_assignment(whole, job.num_parts, balance_edges=balance_edges)
        parts: Array = part_of.numpy()
        return parts
    options = AssigningOptions(job.num_parts, job.method, job.seed, (IN_EDGES,) if job.balance == "edges" else ())
    return assign(options, graph, scratch, memory, lambda doing, share: None).part_of


def _repeat(job: Job, repeats: int, threads: int, time_limit: float) -> Row:
    """Medians of several runs."""
    runs: list[Row] = [
        run_workers(measure, job, n_workers=1, n_threads=threads, time_limit=time_limit)[0] for _ in range(repeats)
    ]
    seconds, peaks = (median(values) for values in list(zip(*runs, strict=True))[:2])
    return runs[0]._replace(seconds=seconds, peak=peaks)


if __name__ == "__main__":
    command.run_main(main)
