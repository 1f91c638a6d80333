"""A graph larger than memory, from edges to the outputs of all nodes, in several sizes: `python -m benchmarks.scale`.

For each size: make a graph, and in a control group, whose memory beside that of libraries is in proportion to the
edges, partition it, train each model on one partition at a time, and write the outputs of all nodes. Beside that the
same models train on the whole graph in one process, without sar, in a group of 5 GiB. What a step took is kept in
`results.json` in the folder of `--work`, so an interrupted run goes on with the next step, and a finished one is only
written to the pages again: docs/scale.md and a sentence of the README.
"""

import argparse
import json
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import command, edge_files, scale_page
from benchmarks.control_group import Taken, run_limited
from benchmarks.edge_files import GeneratedEdges
from benchmarks.graphs import NUM_CLASSES, GeneratedSize
from benchmarks.report import setting
from benchmarks.scale_page import MODELS, Size
from sar.errors import SarError

SIZES = 3e6, 1e7, 3e7, 1e8
DEGREE, COMMUNITIES, HOMOPHILY = 20, 1024, 0.8
GRAPH = f"{COMMUNITIES:,} communities, {DEGREE} edges a node, {HOMOPHILY:.0%} of them within a community"
MOST_MEMORY = 5 * 2**30
LIBRARIES = 512 * 2**20  # of a worker and its launcher
MEMORY_PER_EDGE = (MOST_MEMORY - LIBRARIES) / max(SIZES)
LEAST_MEMORY = 700 * 2**20
SCRIPT = Path(__file__).with_name("scale_run.py")
SAR = sys.executable, "-m", "sar.cli"


@dataclass(frozen=True)
class Step:
    """A command of the sequence, with the file or folder that later ones need, if any, and the memory of its group."""

    name: str
    words: Sequence[str]
    limit: int
    makes: str = "."


def main(argv: Sequence[str]) -> None:
    """Measure what is not yet measured, and write the pages."""
    parser = command.new_parser("benchmarks.scale", __doc__, generates=False, repeats=0)
    parser.set_defaults(time_limit=7200)
    parser.add_argument("--edges", nargs="+", type=float, default=list(SIZES), metavar="E", help="(%(default)s)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(all)")
    parser.add_argument("--parts", type=int, default=16, metavar="P", help="(%(default)s)")
    parser.add_argument("--epochs", type=int, default=2, metavar="N", help="of which the last one counts (%(default)s)")
    arguments = parser.parse_args(argv)
    conditions = setting("", {"graph": GRAPH}).splitlines()[1]
    with command.work_directory(arguments.work) as work:
        file = work / "results.json"
        results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        for edges in map(int, arguments.edges):
            steps = results.setdefault(str(edges), {})
            for name, taken in measure(edges, steps, arguments, work / f"edges-{edges}"):
                steps[name] = taken
                results["setting"] = conditions
                file.with_suffix(".unfinished").write_text(json.dumps(results))
                file.with_suffix(".unfinished").rename(file)
    sizes = []
    for edges in sorted(map(int, arguments.edges)):
        steps = {name: Taken(**step) for name, step in results[str(edges)].items()}
        sizes.append(Size(edges // DEGREE, edges, arguments.parts, steps))
    scale_page.write(arguments.docs, command.shown("benchmarks.scale", argv), results["setting"], sizes)


def steps_of(edges: int, arguments: argparse.Namespace) -> Iterator[Step]:
    """The sequence, with names of files in the folder of the graph."""
    limit = max(LEAST_MEMORY, LIBRARIES + int(edges * MEMORY_PER_EDGE))
    fields = [word for name in ("feat", "label") for word in ("--node-feature", f"{name}={name}.npy")]
    divided = ["--parts", str(arguments.parts), "--method", "multilevel", "--out", "partitions"]
    beside = ["--split", "0.6,0.2,0.2", "--memory-limit", f"{(limit - LIBRARIES) // 2**21}MiB"]
    yield Step("partition", [*SAR, "partition", "edges.npy", *fields, *beside, *divided], limit, "partitions")
    out_of_core = "--memory", f"{limit >> 20}MiB", "--spill", "."
    for model in arguments.models:
        weights, how = f"{model}.pt", ["--model", model, "--epochs", str(arguments.epochs)]
        launch = [*SAR, "launch", "--workers", "1", *out_of_core, str(SCRIPT), "partitions", *how]
        yield Step(f"{model} train", [*launch, "--weights", weights], limit, weights)
        how = ["--model", f"{SCRIPT}:{model.lower()}", "--weights", weights, "--out", f"{model}.npy"]
        yield Step(f"{model} infer", [*SAR, "infer", "partitions", *how, *out_of_core], limit)
    for model in arguments.models:
        script = [sys.executable, str(SCRIPT), ".", "--whole", "--model", model]
        yield Step(f"{model} whole", script, MOST_MEMORY)


def measure(
    edges: int, known: dict[str, Any], arguments: argparse.Namespace, folder: Path
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the steps that are not known yet, and remove the files at the end."""
    steps = list(steps_of(edges, arguments))
    if all(step.name in known for step in steps):
        return
    make_graph(GeneratedEdges(edges // DEGREE, edges, COMMUNITIES, HOMOPHILY), folder)
    for step in steps:
        if step.name in known and (folder / step.makes).exists():
            continue
        log = folder / f"{step.name}.log"
        taken = run_limited(step.words, step.limit, folder, log, arguments.time_limit)
        out_of_memory = taken.status == -signal.SIGKILL or "can't allocate memory" in log.read_text()
        if taken.status != 0 and not (out_of_memory and step.name.endswith("whole")):
            raise SarError(f"{' '.join(step.words)} ended with status {taken.status}:\n{log.read_text()[-2000:]}")
        if step.name == "partition":
            report = json.loads((folder / "partitions" / "report.json").read_text())
            taken.said.append({key: report[key] for key in ("edge_cut", "replication_factor")})
        print(f"{edges:,} edges: {step.name}: {taken.seconds:.1f} s, {taken.anonymous / 1e6:.0f} MB", flush=True)
        yield step.name, asdict(taken)
    shutil.rmtree(folder)


def make_graph(size: GeneratedEdges, folder: Path) -> None:
    """Write edges.npy, (E, 2) int32, feat.npy, (N, 128) float32, and label.npy, (N,) int64, unless they are there."""
    if (folder / "label.npy").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    edges, _ = edge_files.prepare("sbm", size, folder, folder, seed=0)
    edges.rename(folder / "edges.npy")
    labels = edge_files.communities(size, seed=0) * NUM_CLASSES // size.communities
    rng = np.random.default_rng(0)
    width = GeneratedSize.features
    centres = 0.3 * rng.standard_normal((NUM_CLASSES, width), np.float32)
    rows = np.lib.format.open_memmap(folder / "feat.npy", "w+", np.float32, (size.nodes, width))
    for begin in range(0, size.nodes, edge_files.PIECE):
        piece = labels[begin : begin + edge_files.PIECE]
        rows[begin : begin + len(piece)] = centres[piece] + rng.standard_normal((len(piece), width), np.float32)
    rows.flush()
    np.save(folder / "label.npy", labels)


if __name__ == "__main__":
    command.run_main(main)
