"""What it costs to compare a partition with its checksums while it is loaded.

One process loads a directory of one part again and again, with `verify` on and off in turn. The files are in the page
cache: the share of the checksums is greatest where reading is fastest.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

import sar
from benchmarks import command
from sar.partition.graph_source import ArrayEdges, GraphSource
from sar.partition.inspect.text_tables import as_text
from sar.partition.write.write import write_partitions

SHAPES = {
    "node features": (400_000, 4_000_000, 100, 0),
    "wide node features": (100_000, 400_000, 400, 0),
    "edge features": (100_000, 1_000_000, 0, 100),
    "structure": (400_000, 4_000_000, 0, 0),
}
"""Nodes, edges, float32 features of a node and of an edge."""


def main(argv: Sequence[str]) -> None:
    """Measure all shapes and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies verification", description=__doc__)
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep and reuse partitions here")
    parser.add_argument("--repeats", type=int, default=15, metavar="N", help="of either (%(default)s)")
    parser.add_argument("--scale", type=float, default=1, metavar="X", help="of nodes and edges (%(default)s)")
    arguments = parser.parse_args(argv)
    rows = [("shape", "MB", "s without", "s with", "ratio", "least and greatest ratio of a pair")]
    with command.work_directory(arguments.work) as work:
        for name, shape in SHAPES.items():
            folder = work / f"{name.replace(' ', '-')}-{arguments.scale:g}"
            if not folder.exists():
                _write(folder, *shape, arguments.scale)
            plain, checked = measure(folder, arguments.repeats)
            megabytes = sum(file.stat().st_size for file in folder.rglob("*.dgl")) / 1e6
            ratios = [one / other for one, other in zip(checked, plain, strict=True)]
            seconds = f"{median(plain):.3f}", f"{median(checked):.3f}", f"{median(checked) / median(plain):.3f}"
            rows.append((name, f"{megabytes:.0f}", *seconds, f"{min(ratios):.2f} {max(ratios):.2f}"))
    print(as_text(rows, 1))


def measure(folder: Path, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of loading without and with checksums, in turn and each first in every second turn."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(-1, repeats):  # the first brings the files into the page cache
        for verify in (False, True) if number % 2 else (True, False):
            start = time.perf_counter()
            sar.load_dgl_partition_data(folder, 0, "cpu", verify=verify)
            if number >= 0:
                seconds[verify].append(time.perf_counter() - start)
    return seconds[False], seconds[True]


def _write(folder: Path, nodes: int, edges: int, node_width: int, edge_width: int, scale: float) -> None:
    nodes, edges, rng = int(nodes * scale), int(edges * scale), np.random.default_rng(0)
    etype = ("_N", "_E", "_N")
    node_data = {"_N": {"feat": rng.random((nodes, node_width), np.float32)} if node_width else {}}
    edge_data = {etype: {"feat": rng.random((edges, edge_width), np.float32)} if edge_width else {}}
    ends = ArrayEdges(rng.integers(0, nodes, edges), rng.integers(0, nodes, edges))
    graph = GraphSource({"_N": nodes}, {etype: ends}, node_data, edge_data)
    write_partitions(graph, np.zeros(nodes, np.int64), 1, folder, "graph", method="custom")
