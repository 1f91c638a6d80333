"""Memory and time with one partition in memory, by number of partitions: `python -m benchmarks.out_of_core`.

Compared with the same training on the whole graph in memory. Memory is the peak of anonymous resident memory in
training, above that of training the same model on 200 nodes, which loads all code. Cached pages of the spill file do
not count, as the system can drop them; `benchmarks.scale` has a limit that includes them.
"""

import argparse
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from benchmarks import command
from benchmarks.graphs import GeneratedSize, Prepared, prepare
from benchmarks.models import MODELS
from benchmarks.out_of_core_run import EPOCH, IMPORTED
from benchmarks.plots import draw_lines
from benchmarks.report import publish, setting
from sar.errors import SarError
from sar.host.memory import PeakAnonymous

PICTURE = "out_of_core.png"
HEADER = ("model", "partitions", "MB in training", "MB / in memory", "s / epoch", "s / in memory")


class Run(NamedTuple):
    """One training."""

    losses: list[float]
    megabytes: float  # peak
    seconds: float  # median epoch, without the first


def main(argv: Sequence[str]) -> None:
    """Run the benchmark, and write the table."""
    parser = command.new_parser("benchmarks.out_of_core", __doc__, repeats=0)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, help="(all)")
    parser.add_argument("--parts", nargs="+", type=int, default=[8, 32], metavar="P", help="(%(default)s)")
    parser.add_argument("--epochs", type=int, default=3, metavar="N", help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="(%(default)s)")
    arguments = parser.parse_args(argv)
    with command.work_directory(arguments.work) as work:
        graph = prepare("rmat", command.size_of(arguments), arguments.data, work, arguments.seed)
        rows = trainings(graph, arguments)
    options = {"graph": graph.words().replace("*", ""), "threads": str(arguments.threads)}
    conditions = setting(command.shown("benchmarks.out_of_core", argv), options)
    picture = f"![Memory and time of an epoch against the number of partitions]({PICTURE})"
    publish(arguments.docs / "out_of_core.md", "out of core", conditions, rows, picture)


def trainings(graph: Prepared, arguments: argparse.Namespace) -> list[tuple[str, ...]]:
    """Rows by model and number of partitions, after `HEADER`. Also draws the picture."""
    small_size = GeneratedSize(200, 1000, arguments.features)
    small = prepare("rmat", small_size, arguments.data, graph.folder, arguments.seed)
    how = {"classes": graph.num_classes, "epochs": arguments.epochs}
    rows: list[tuple[str, ...]] = [HEADER]
    megabytes, ratios = dict[str, list[float]](), dict[str, list[float]]()
    for model in arguments.models:
        base = measure(small, model, 1, arguments, **how).megabytes
        runs = {parts: measure(graph, model, parts, arguments, **how) for parts in (1, *arguments.parts)}
        for run in runs.values():
            if not np.allclose(run.losses, runs[1].losses, rtol=1e-3):
                raise SarError(f"{model}: losses are {run.losses}; expected {runs[1].losses}, as in memory.")
        whole = runs[1].megabytes - base
        megabytes[model] = [run.megabytes - base for run in runs.values()]
        ratios[model] = [run.seconds / runs[1].seconds for run in runs.values()]
        for (parts, run), size, ratio in zip(runs.items(), megabytes[model], ratios[model], strict=True):
            share = "1" if parts == 1 else f"1 / {whole / size:.1f}"
            name = "in memory" if parts == 1 else str(parts)
            rows.append((model, name, f"{size:.0f}", share, f"{run.seconds:.2f}", f"{ratio:.2f}"))
    panels = {"MB in training": megabytes, "time of an epoch / in memory": ratios}
    draw_lines([1, *arguments.parts], panels, arguments.docs / PICTURE, "partitions, one in memory at a time")
    return rows


def measure(graph: Prepared, model: str, parts: int, arguments: argparse.Namespace, **options: object) -> Run:
    """Run the script in a new process, with a virtual worker for each partition if there are several."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[1])}
    environment |= {"THP_MEM_ALLOC_ENABLE": "1"}  # as in a script that calls sar before it creates a tensor
    if parts > 1:
        environment |= {"SAR_RESIDENT": "1", "SAR_SPILL_DIR": str(graph.folder), "SAR_PARTS": str(parts)}
    script = [sys.executable, "-m", "benchmarks.out_of_core_run", str(graph.partitions(parts)), "--model", model]
    script += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with subprocess.Popen(script, env=environment, stdout=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(arguments.time_limit, process.kill)
        timer.start()
        try:
            run = _listen(process)
        finally:
            timer.cancel()
            process.kill()
    if process.returncode != 0:
        raise SarError(f"{' '.join(script)} ended with status {process.returncode}.")
    print(f"{graph.name}: {model}, {parts} partitions: {run}", flush=True)
    return run


def _listen(process: "subprocess.Popen[str]") -> Run:
    """Record a run's memory at the times it reports."""
    assert process.stdout is not None
    memory: PeakAnonymous | None = None
    losses, seconds = list[float](), list[float]()
    for line in process.stdout:
        words = line.split()
        if words[0] == IMPORTED:
            memory = PeakAnonymous(words[1])
        elif words[:3] == [EPOCH, "0", "begins"] and memory is not None:
            memory.peak = 0
        elif words[0] == EPOCH and words[2] == "took":
            seconds.append(float(words[3]))
            losses.append(float(words[5]))
    process.wait()
    peak = 0 if memory is None else memory.baseline + memory.above_baseline()
    return Run(losses, peak / 2**20, median(seconds[1:] or seconds or [0.0]))


if __name__ == "__main__":
    command.run_main(main)
