"""Outputs of all nodes of a graph larger than memory: `python -m benchmarks.out_of_core_inference`.

sar computes one partition after the other, as in `examples/evaluate.py`. It is compared with layers that gather the
rows of in-neighbours from mapped files, with the nodes in the order of the partitions, so that neighbours are close to
each other. Both run in a control group, page cache included, and start with an empty page cache. Gathering takes long:
one batch in `--share` is computed, and its seconds and bytes are multiplied. sar's outputs are compared with those of
the whole graph in memory. Writes the table into docs/out_of_core.md.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import command
from benchmarks.graphs import GeneratedSize, Prepared, prepare
from benchmarks.limits import control_group
from benchmarks.out_of_core import measure
from benchmarks.out_of_core_inference_run import FEATURES, OFFSETS, SOURCES
from benchmarks.report import describe_setting, write_section
from benchmarks.results import setting
from sar.data.arrays import Array
from sar.data.part_files import FeatureFiles
from sar.data.partition_json import read_partition_json
from sar.partition.inspect.text_tables import as_markdown

SCRIPT = "out_of_core_inference_run"
HEADER = ("model", "computed by", "s", "MB read", "MB written", "largest difference")


def arrays(graph: Prepared, parts: int) -> tuple[Path, Array]:
    """A folder with features and in-edges of the nodes in the order of the partitions, and that order, (N,)."""
    spec = read_partition_json(graph.partitions(parts))
    order = np.concatenate([FeatureFiles(spec, part, "nodes").original_ids()[0].stored[:] for part in range(parts)])
    folder = graph.folder / f"arrays-{parts}"
    if not (folder / FEATURES).exists():
        folder.mkdir(exist_ok=True)
        place = np.argsort(order)
        src, dst = (place[ids] for ids in graph.data.ends())
        np.save(folder / SOURCES, src[np.argsort(dst, kind="stable")].astype(np.int32))
        np.save(folder / OFFSETS, np.append(0, np.bincount(dst, minlength=len(order)).cumsum()))
        np.save(folder / FEATURES, graph.data.node_data["_N"]["feat"][:][order])
    return folder, order


def forget(folder: Path) -> None:
    """Remove the files of a folder from the page cache."""
    for file in folder.rglob("*"):
        if file.is_file():
            opened = os.open(file, os.O_RDONLY)
            os.fsync(opened)
            os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(opened)


def main(argv: Sequence[str]) -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.out_of_core_inference", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_paths(parser)
    parser.add_argument("--nodes", type=int, default=300_000)
    parser.add_argument("--edges", type=int, default=3_000_000, help="before self-loops are added")
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--models", nargs="+", default=["SAGE", "GAT"], choices=["SAGE", "GAT"])
    parser.add_argument("--parts", type=int, default=32)
    parser.add_argument("--group", type=int, metavar="MB", default=160, help="memory beside code, page cache included")
    parser.add_argument("--batch", type=int, default=1000, help="nodes whose neighbours are gathered at a time")
    parser.add_argument("--share", type=int, default=150, help="one in so many batches is measured")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args(argv)
    with command.work_directory(arguments.work) as work:
        size = GeneratedSize(arguments.nodes, arguments.edges, arguments.features)
        graph = prepare("rmat", size, Path(), work, 0)
        rows = [HEADER, *(row for model in arguments.models for row in _rows(graph, model, work, arguments))]
    details = {
        "graph": f"{graph.data.total_nodes:,} nodes, {graph.data.total_edges:,} edges, {graph.num_features:,} features",
        "memory": f"a control group of {arguments.group} MB, page cache included, {arguments.threads} threads",
        "gathered": f"for {arguments.batch:,} nodes at a time; one in {arguments.share} batches is measured",
    }
    described = describe_setting(setting(command.shown("benchmarks.out_of_core_inference", argv), details))
    write_section(arguments.docs / "out_of_core.md", "evaluation", f"{as_markdown(rows)}\n\n{described}")


def _rows(graph: Prepared, model: str, work: Path, arguments: argparse.Namespace) -> list[tuple[str, ...]]:
    """Two rows for one model: by partitions, and by gathering."""
    how: dict[str, Any] = {"threads": arguments.threads, "script": SCRIPT}
    widths = ["--widths", str(graph.num_features), str(graph.num_classes)]
    expected, rows = graph.folder / f"{model}.npy", []
    measure(graph.partitions(1), model, 1, work, *widths, "--out", str(expected), **how)
    for parts in (arguments.parts, 1):
        partitioned, out = parts > 1, work / "outputs.npy"
        source = graph.partitions(parts) if partitioned else arrays(graph, arguments.parts)[0]
        share = 1 if partitioned else arguments.share
        options = [*widths, "--out", str(out), "--batch", str(arguments.batch), "--share", str(share)]
        forget(graph.folder)
        with control_group(arguments.group) as group:
            run = measure(source, model, parts, work, *options, "--group", str(group), **how)
        difference = f"{np.abs(np.load(out) - np.load(expected)).max():.0e}" if partitioned else ""
        by = f"sar, {parts} partitions" if partitioned else "gathering from a `numpy.memmap`"
        moved = (f"{megabytes * share:,.0f}" for megabytes in (run.read, run.written))
        rows.append((model, by, f"{run.seconds:,.0f}", *moved, difference))
        print(*rows[-1], sep="  ", flush=True)
    return rows


if __name__ == "__main__":
    command.run_main(main)
