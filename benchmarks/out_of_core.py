"""Memory and time against the number of partitions, of which one is in memory: `python -m benchmarks.out_of_core`.

Beside them stands the same training of the whole graph in memory. Memory is the greatest anonymous resident memory
(RssAnon: what cannot be dropped) while it trains, above that of training the same model on a graph of 200 nodes, for
which all code is loaded. Pages of the spill file that the system keeps in its cache are not in it: they go where memory
is needed.

With `--cold` they are dropped at every turn. A run with several partitions then comes after one with them, and the last
columns compare: seconds an epoch in the warm run (its compute and copies), the disk's bandwidth in the same folder, the
mean of before and after, and the seconds over those that follow: warm + written / bandwidth + read / bandwidth.

With `--limit` or `--group` runs with several partitions have so much memory beside their code; that of the whole graph
has all, to compare losses. What that memory is less than stands in the first line.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.graphs import GeneratedSize, Prepared, prepare
from benchmarks.limits import control_group
from benchmarks.models import HIDDEN, MODELS
from benchmarks.out_of_core_training import EPOCH, IMPORTED

SAMPLE_SECONDS = 0.003
LIMIT_SECONDS = 900
DISK_SECONDS = 4.0
"""For which the disk is measured, before and after a run."""
PIECE = 2**24
"""Bytes that are then written and read at a time."""


class Run(NamedTuple):
    """One training.

    parts: 1 for the whole graph in memory.
    megabytes: in training, and at any time after the imports; above `base`.
    seconds: of the median epoch after the first; written and read are megabytes to and from the disk in the mean one.
    """

    model: str
    parts: int
    losses: list[float]
    megabytes: float
    at_any_time: float
    seconds: float
    written: float
    read: float


def measure(
    partition_json: Path,
    model: str,
    parts: int,
    spill: Path,
    *options: str,
    threads: int = 1,
    base: int = 0,
    script: str = "out_of_core_training",
) -> Run:
    """Run a script of this folder in a process of its own, with `parts` virtual workers where there are several."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(Path(__file__).parents[1])}
    environment |= {"THP_MEM_ALLOC_ENABLE": "1"}  # as in a script that sets sar up before it makes a tensor
    if parts > 1:
        environment |= {"SAR_RESIDENT": "1", "SAR_SPILL_DIR": str(spill), "SAR_PARTS": str(parts)}
    command = [sys.executable, "-m", f"benchmarks.{script}", str(partition_json), "--model", model, *options]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(LIMIT_SECONDS, process.kill)
    timer.start()
    memory = _Memory()
    losses: list[float] = []
    seconds: list[float] = []
    whole = 0
    io: list[tuple[int, int]] = []  # at the end of every epoch
    try:
        assert process.stdout is not None
        for line in process.stdout:
            words = line.split()
            if words[0] == IMPORTED:
                memory.watch(int(words[1]))
            elif words[0] == EPOCH and words[2] == "begins" and words[1] == "0":
                whole = memory.peak
                memory.peak = 0
            elif words[0] == EPOCH and words[2] == "took":
                losses.append(float(words[5]))
                seconds.append(float(words[3]))
                io.append(_io(process.pid))
        if process.wait() != 0:
            raise RuntimeError(f"{command} ended with {process.returncode}")
    finally:
        timer.cancel()
        process.kill()
        memory.stop()
    training, any_time = memory.peak - base, max(memory.peak, whole) - base
    later = max(len(io) - 1, 1)
    moved = [(end - begin) / later for begin, end in zip(io[0] if io[1:] else (0, 0), io[-1], strict=True)]
    in_training, at_any_time, *others = (number / 2**20 for number in (training, any_time, *moved))
    return Run(model, parts, losses, in_training, at_any_time, median(seconds[1:] or seconds), *others)


class Cold(NamedTuple):
    """What an epoch without a page cache is compared with: `warm` seconds, and a disk of so many bytes a second."""

    warm: float
    write: float
    read: float

    def expected(self, run: Run) -> float:
        """Seconds of an epoch whose bytes go to and from the disk while nothing is computed."""
        return self.warm + run.written * 2**20 / self.write + run.read * 2**20 / self.read


def measure_cold(file: Path, model: str, parts: int, spill: Path, *options: str, **how: Any) -> tuple[Run, Cold]:
    """Train without a page cache of the spilled tensors, and measure what that is compared with."""
    warm = measure(file, model, parts, spill, *options, **how)
    most = round((warm.written + 1) * 2**20)  # as much as an epoch writes
    disk = [_disk_bandwidth(spill, most)]
    run = measure(file, model, parts, spill, *options, "--cold", **how)
    disk.append(_disk_bandwidth(spill, most))
    return run, Cold(warm.seconds, *(sum(either) / 2 for either in zip(*disk, strict=True)))


def _disk_bandwidth(folder: Path, most: int) -> tuple[float, float]:
    """Bytes per second to and from the disk of a folder, past the page cache; `most` bytes are written at most."""
    piece, written, read = os.urandom(PIECE), 0, 0  # some file systems compress
    with tempfile.TemporaryFile(dir=folder) as file:
        began = now = time.perf_counter()
        while not written or (now - began < DISK_SECONDS / 2 and written + PIECE <= most):
            written += os.write(file.fileno(), piece)
            os.fdatasync(file.fileno())
            now = time.perf_counter()
        write = written / (now - began)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = now = time.perf_counter()
        while read < written and now - began < DISK_SECONDS / 2:
            read += len(os.pread(file.fileno(), PIECE, read))
            now = time.perf_counter()
    return write, read / (now - began)


class _Memory:
    """The greatest RssAnon of a process, in bytes, sampled by a thread."""

    def __init__(self) -> None:
        self.peak = 0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, pid: int) -> None:
        """Begin, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(pid,), daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, pid: int) -> None:
        with suppress(OSError):  # it has ended
            while not self._end.is_set():
                self.peak = max(self.peak, _anonymous(pid))
                time.sleep(SAMPLE_SECONDS)


def _anonymous(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        return next((int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon")), 0)


def _io(pid: int) -> tuple[int, int]:
    """Bytes that a process has had written to and read from the disk."""
    lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(lines["write_bytes"]), int(lines["read_bytes"])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("bench-out-of-core"), help="graph, partitions, spill file")
    parser.add_argument("--nodes", type=int, default=GeneratedSize.nodes)
    parser.add_argument("--edges", type=int, default=GeneratedSize.edges)
    parser.add_argument("--features", type=int, default=GeneratedSize.features)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--parts", nargs="+", type=int, default=[1, 8, 32], help="1: the whole graph in memory")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cold", action="store_true", help="drop the page cache of spilled tensors at every turn")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--limit", type=int, metavar="MB", help="RLIMIT_DATA beside code")
    either.add_argument("--group", type=int, metavar="MB", help="control group with so much, page cache included")
    arguments = parser.parse_args()
    size = GeneratedSize(arguments.nodes, arguments.edges, arguments.features)
    graph = prepare("rmat", size, Path(), arguments.work, 0)
    options = ["--epochs", str(arguments.epochs), "--classes", str(graph.num_classes)]
    small = prepare("rmat", GeneratedSize(200, 1000, arguments.features), Path(), arguments.work, 0)
    results: list[dict[str, Any]] = []
    if arguments.limit is not None or arguments.group is not None:
        print(_sizes(graph, arguments.limit or arguments.group), "\n")
    titles = ["model", "partitions", "loss", "MB in training", "MB at any time", "s / epoch", "MB written", "MB read"]
    titles += ["s warm", "MB/s to disk", "MB/s from disk", "s / expected"] if arguments.cold else []
    _print_row(titles)
    _print_row(["---"] * len(titles))
    for model in arguments.models:
        base = round(measure(small.partitions(1), model, 1, arguments.work, *options[:4]).megabytes * 2**20)
        for parts in arguments.parts:
            file = graph.partitions(parts)
            how: dict[str, Any] = {"threads": arguments.threads, "base": base}
            cold = None
            limits = ["--limit", str(arguments.limit)] if arguments.limit is not None and parts > 1 else []
            limited = arguments.group is not None and parts > 1
            with control_group(arguments.group) if limited else nullcontext() as group:
                limits += [] if group is None else ["--group", str(group)]
                if arguments.cold and parts > 1:
                    run, cold = measure_cold(file, model, parts, arguments.work, *options, *limits, **how)
                else:
                    run = measure(file, model, parts, arguments.work, *options, *limits, **how)
            results.append({**run._asdict(), "cold": None if cold is None else cold._asdict()})
            row = [model, parts, f"{run.losses[-1]:.6f}", f"{run.megabytes:.0f}", f"{run.at_any_time:.0f}"]
            row += [f"{run.seconds:.2f}", f"{run.written:.0f}", f"{run.read:.0f}"]
            if cold is not None:
                row += [f"{cold.warm:.2f}", f"{cold.write / 2**20:.0f}", f"{cold.read / 2**20:.0f}"]
                row.append(f"{run.seconds / cold.expected(run):.2f}")
            _print_row(row)
    (arguments.work / "out-of-core.json").write_text(json.dumps(results))


def _sizes(graph: Prepared, allowed: int) -> str:
    nodes, edges = graph.data.total_nodes, graph.data.total_edges * 16 / 2**20
    features, activations = nodes * graph.num_features * 4 / 2**20, nodes * 2 * HIDDEN * 4 / 2**20
    return (
        f"Features: {features:.0f} MB. Edges, as pairs of node IDs: {edges:.0f} MB. Rows of two hidden layers: "
        f"{activations:.0f} MB. Memory for runs with several partitions: {allowed} MB."
    )


def _print_row(cells: list[Any]) -> None:
    print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
