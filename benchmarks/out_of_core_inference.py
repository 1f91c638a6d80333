"""Outputs of all nodes of a graph larger than memory: `python -m benchmarks.out_of_core_inference`.

Partitions in turns, as in `examples/evaluate.py`, beside layers computed by gathering rows out of mapped files. Both
have little memory, page cache included, and nothing in the page cache at first. Outputs of partitions are compared with
those of the whole graph in memory. Gathering takes long: one batch in `--share` is computed, and its seconds and bytes
count so often. It has the nodes in the order of the partitions, so that neighbours are close to each other.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.graphs import GeneratedSize, Prepared, prepare
from benchmarks.limits import control_group
from benchmarks.out_of_core import _print_row, measure
from benchmarks.out_of_core_inference_run import FEATURES, OFFSETS, SOURCES
from sar.data.arrays import Array
from sar.data.part_files import FeatureFiles
from sar.data.partition_json import read_partition_json

SCRIPT = "out_of_core_inference_run"


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
    """Have nothing of a folder's files in the page cache."""
    for file in folder.rglob("*"):
        if file.is_file():
            opened = os.open(file, os.O_RDONLY)
            os.fsync(opened)
            os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(opened)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("bench-out-of-core"), help="graph, partitions, outputs")
    parser.add_argument("--nodes", type=int, default=300_000)
    parser.add_argument("--edges", type=int, default=3_000_000)
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--models", nargs="+", default=["SAGE", "GAT"], choices=["SAGE", "GAT"])
    parser.add_argument("--parts", type=int, default=32)
    parser.add_argument("--group", type=int, metavar="MB", default=160, help="memory beside code, page cache included")
    parser.add_argument("--batch", type=int, default=1000, help="nodes whose neighbours are gathered at a time")
    parser.add_argument("--share", type=int, default=150, help="of so many batches one is measured")
    parser.add_argument("--by", nargs="+", default=["turns", "gather"], choices=["turns", "gather"])
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    size, work = GeneratedSize(arguments.nodes, arguments.edges, arguments.features), arguments.work
    graph = prepare("rmat", size, Path(), work, 0)
    how: dict[str, Any] = {"threads": arguments.threads, "script": SCRIPT}
    arrays(graph, arguments.parts)
    widths = ["--widths", str(graph.num_features), str(graph.num_classes)]
    _print_row(["model", "by", "s", "MB written", "MB read", "greatest difference"])
    for model in arguments.models:
        expected = graph.folder / f"{model}.npy"
        if not expected.exists():
            measure(graph.partitions(1), model, 1, work, *widths, "--out", str(expected), **how)
        for by in arguments.by:
            turns, out = by == "turns", work / f"{by}.npy"
            source = graph.partitions(arguments.parts) if turns else graph.folder / f"arrays-{arguments.parts}"
            share = 1 if turns else arguments.share
            options = [*widths, "--out", str(out), "--batch", str(arguments.batch), "--share", str(share)]
            forget(graph.folder)
            with control_group(arguments.group) as group:
                run = measure(
                    source, model, arguments.parts if turns else 1, work, *options, "--group", str(group), **how
                )
            apart = f"{np.abs(np.load(out) - np.load(expected)).max():.1e}" if turns else "-"
            _print_row([model, by, f"{run.seconds:.1f}", round(run.written * share), round(run.read * share), apart])


if __name__ == "__main__":
    main()
