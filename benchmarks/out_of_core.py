"""Memory and time against the number of partitions, one of them in memory: `python -m benchmarks.out_of_core`.

The same training of the whole graph in memory is beside them. Memory is the greatest anonymous resident memory
(RssAnon, which cannot be dropped) while it trains, above that of training the same model on a graph of 200 nodes, for
which all code is loaded. Pages of the spill file that the system keeps in its cache are not in it: they go if memory is
needed. With `--group` runs with several partitions have a control group of so much memory, page cache included.

With `--evaluate` the outputs of all nodes are computed, starting with an empty page cache, and compared with those of
the whole graph in memory. Both write a table into docs/out_of_core.md.
"""

import argparse
import contextlib
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
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
from sar.errors import ConfigError, SarError

SAMPLE_SECONDS = 0.003
PICTURE = "out_of_core.png"
HEADER = ("model", "partitions", "MB in training", "MB / in memory", "s / epoch", "s / in memory")
EVALUATION = ("model", "computed by", "s", "MB read", "MB written", "largest difference")
CONTROL_GROUPS = Path("/sys/fs/cgroup")


class Run(NamedTuple):
    """One training or evaluation."""

    losses: list[float]
    megabytes: float  # at the peak
    seconds: float  # of the median epoch after the first
    written: float  # MB to the disk in the mean epoch after the first
    read: float


def main(argv: Sequence[str]) -> None:
    """Measure, and write the table."""
    parser = command.new_parser("benchmarks.out_of_core", __doc__, repeats=0)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, help="(all)")
    parser.add_argument("--parts", nargs="+", type=int, default=[8, 32], metavar="P", help="(%(default)s)")
    parser.add_argument("--epochs", type=int, default=3, metavar="N", help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="(%(default)s)")
    parser.add_argument("--group", type=int, metavar="MB", help="memory of a control group, page cache included")
    parser.add_argument("--evaluate", action="store_true", help="compute outputs of all nodes instead of training")
    arguments = parser.parse_args(argv)
    with command.work_directory(arguments.work) as work:
        graph = prepare("rmat", command.size_of(arguments), arguments.data, work, arguments.seed)
        rows = evaluations(graph, arguments) if arguments.evaluate else trainings(graph, arguments)
    memory = "all of the machine" if arguments.group is None else f"a control group of {arguments.group} MB"
    options = {"graph": graph.words().replace("*", ""), "memory": f"{memory}, {arguments.threads} threads"}
    conditions = setting(command.shown("benchmarks.out_of_core", argv), options)
    section = "evaluation" if arguments.evaluate else "out of core"
    alt = "Memory and time of an epoch against the number of partitions"
    picture = "" if arguments.evaluate else f"![{alt}]({PICTURE})"
    publish(arguments.docs / "out_of_core.md", section, conditions, rows, picture)


def trainings(graph: Prepared, arguments: argparse.Namespace) -> list[tuple[str, ...]]:
    """A row for each model and number of partitions; `HEADER` first. Draws the picture."""
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


def evaluations(graph: Prepared, arguments: argparse.Namespace) -> list[tuple[str, ...]]:
    """A row for each model and number of partitions; `EVALUATION` first."""
    rows: list[tuple[str, ...]] = [EVALUATION]
    for model in arguments.models:
        expected, out = (graph.folder / f"{model}-{name}.npy" for name in ("whole", "parts"))
        measure(graph, model, 1, arguments, classes=graph.num_classes, out=expected)
        for parts in arguments.parts:
            graph.partitions(parts)
            _forget(graph.folder)
            run = measure(graph, model, parts, arguments, classes=graph.num_classes, out=out)
            difference = f"{np.abs(np.load(out) - np.load(expected)).max():.0e}"
            moved = f"{run.read:,.0f}", f"{run.written:,.0f}"
            rows.append((model, f"sar, {parts} partitions", f"{run.seconds:,.0f}", *moved, difference))
    return rows


def measure(graph: Prepared, model: str, parts: int, arguments: argparse.Namespace, **options: object) -> Run:
    """Run the script in a process of its own, with a virtual worker for each partition if there are several."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[1])}
    environment |= {"THP_MEM_ALLOC_ENABLE": "1"}  # as in a script that sets sar up before it makes a tensor
    if parts > 1:
        environment |= {"SAR_RESIDENT": "1", "SAR_SPILL_DIR": str(graph.folder), "SAR_PARTS": str(parts)}
    script = [sys.executable, "-m", "benchmarks.out_of_core_run", str(graph.partitions(parts)), "--model", model]
    script += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    limited = arguments.group is not None and parts > 1
    with control_group(arguments.group) if limited else contextlib.nullcontext() as group:
        script += [] if group is None else ["--group", str(group)]
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
    """Note memory and disk traffic of a run at the moments of which it tells."""
    assert process.stdout is not None
    memory = MemorySampler()
    losses, seconds, moved = list[float](), list[float](), list[tuple[int, int]]()
    for line in process.stdout:
        words = line.split()
        if words[0] == IMPORTED:
            memory.watch(int(words[1]))
        elif words[:3] == [EPOCH, "0", "begins"]:
            memory.peak = 0
        elif words[0] == EPOCH and words[2] == "took":
            seconds.append(float(words[3]))
            losses.append(float(words[5]))
            moved.append(_disk_traffic(process.pid))
    process.wait()
    memory.stop()
    if not moved:
        return Run([], 0, 0, 0, 0)
    first, later = moved[0] if moved[1:] else (0, 0), max(len(moved) - 1, 1)
    written, read = ((end - begin) / later / 2**20 for begin, end in zip(first, moved[-1], strict=True))
    return Run(losses, memory.peak / 2**20, median(seconds[1:] or seconds), written, read)


class MemorySampler:
    """The greatest RssAnon of a process, in bytes, sampled by a thread."""

    def __init__(self) -> None:
        self.peak = 0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, pid: int) -> None:
        self._thread = threading.Thread(target=self._run, args=(pid,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, pid: int) -> None:
        with contextlib.suppress(OSError):  # it has ended
            while not self._end.wait(SAMPLE_SECONDS):
                with open(f"/proc/{pid}/status") as status:
                    lines = (line.split() for line in status if line.startswith("RssAnon"))
                    self.peak = max(self.peak, *(int(words[1]) * 1024 for words in lines), 0)


def _disk_traffic(pid: int) -> tuple[int, int]:
    """Bytes that a process has had written to and read from the disk."""
    lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(lines["write_bytes"]), int(lines["read_bytes"])


def _forget(folder: Path) -> None:
    """Remove the files of a folder from the page cache."""
    for file in filter(Path.is_file, folder.rglob("*")):
        opened = os.open(file, os.O_RDONLY)
        os.fsync(opened)
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(opened)


@contextlib.contextmanager
def control_group(megabytes: int) -> Iterator[Path]:
    """A group below this process's own, for children to join; gone at the end, when they must have ended.

    Page cache counts, too, as on a small machine. What a process has had before it joins stays with the group that it
    was in, so the limit is on memory that it takes later, and on pages of files that it is the first to read or write.

    Raises:
        ConfigError: there is no controller of memory, or this process may not use it.
    """
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    folder = CONTROL_GROUPS / "memory" / own["memory"].lstrip("/") if "memory" in own else None
    parent = folder or CONTROL_GROUPS / own.get("", "").lstrip("/")
    group, limit = parent / f"sar-{os.getpid()}", "memory.limit_in_bytes" if "memory" in own else "memory.max"
    try:
        group.mkdir()
    except OSError as error:
        raise ConfigError(f"Cannot make a control group in {parent}: {error.strerror}.") from error
    try:
        if not (group / limit).exists():
            raise ConfigError(f"{parent} does not give its groups a controller of memory.")
        (group / limit).write_text(str(megabytes * 2**20))
        yield group
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM):
            raise
        raise ConfigError(f"Cannot set {limit} in {group}: {error.strerror}.") from error
    finally:
        group.rmdir()


if __name__ == "__main__":
    command.run_main(main)
