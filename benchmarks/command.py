"""What the benchmarks' command lines have in common: options, the work directory, and how they end."""

import argparse
import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.graphs import DATA, GeneratedSize
from benchmarks.measure import Job
from benchmarks.models import MODELS
from benchmarks.results import setting
from benchmarks.runs import Plan
from sar.errors import SarError

DOCS = Path(__file__).resolve().parent.parent / "docs"
PATHS = ("--work", "--docs", "--data", "--from")


def add_common(parser: argparse.ArgumentParser, *, workers: Sequence[int], modes: Sequence[int] = (1,)) -> None:
    """Declare the options that all benchmarks of time and memory take."""
    size = GeneratedSize()
    add_paths(parser)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="(all)")
    parser.add_argument("--workers", nargs="+", type=int, default=list(workers), metavar="W", help="(%(default)s)")
    parser.add_argument("--modes", nargs="+", type=int, choices=(1, 2, 3), default=list(modes), help="(%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="of every run (%(default)s)")
    parser.add_argument("--epochs", type=int, default=5, metavar="N", help="that are timed (%(default)s)")
    parser.add_argument("--warm-up", type=int, default=2, metavar="N", help="epochs before them (%(default)s)")
    parser.add_argument("--nodes", type=int, default=size.nodes, metavar="N", help="of the generated graph")
    parser.add_argument("--edges", type=int, default=size.edges, metavar="N", help="of the generated graph")
    parser.add_argument("--features", type=int, default=size.features, metavar="F", help="where random (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of graph, split and parameters (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of single-process DGL (%(default)s)")
    parser.add_argument(
        "--allocator",
        choices=("least", "kept", "system"),
        default="least",
        help="Config.allocator of all processes, DGL's too; LD_PRELOAD, if set, overrides it (%(default)s)",
    )
    parser.add_argument("--wire", choices=("bfloat16", "float16"), help="Config.wire_dtype_features and _gradients")
    parser.add_argument("--time-limit", type=float, default=600, metavar="S", help="for one run (%(default)s)")


def add_paths(parser: argparse.ArgumentParser) -> None:
    """Declare where things are read from and written to."""
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep and reuse graphs and partitions here")
    parser.add_argument("--docs", type=Path, default=DOCS, metavar="DIR", help="gets benchmarks.md and pictures")
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR", help="of real graphs, as .npz files")


def add_graphs(parser: argparse.ArgumentParser, option: str, generated: Sequence[str], real: Sequence[str]) -> None:
    """Declare which graphs to take."""
    default = f"default: {', '.join(generated)}, and of {', '.join(real)} those that are in --data"
    parser.add_argument(option, nargs="+", metavar="NAME", help=default)


def graphs_of(given: Sequence[str] | None, generated: Sequence[str], real: Sequence[str], data: Path) -> list[str]:
    """The graphs that were asked for, or all that are there."""
    return list(given or [*generated, *(name for name in real if (data / f"{name}.npz").exists())])


def plan_of(arguments: argparse.Namespace) -> Plan:
    """The plan that the options describe."""
    job = Job("", 0, arguments.warm_up, arguments.epochs, 0.01, arguments.seed)
    job = replace(job, wire=arguments.wire, allocator=arguments.allocator)
    return Plan(
        arguments.models,
        arguments.workers,
        arguments.modes,
        arguments.repeats,
        job,
        arguments.threads,
        arguments.time_limit,
    )


def size_of(arguments: argparse.Namespace) -> GeneratedSize:
    """The size of the generated graph."""
    return GeneratedSize(arguments.nodes, arguments.edges, arguments.features)


def setting_of(module: str, argv: Sequence[str], arguments: argparse.Namespace) -> dict[str, str]:
    """What the numbers of time and memory depend on."""
    threads = f"{arguments.threads} together, allocator {allocator(arguments)}, huge pages for all"
    repeats = f"{arguments.repeats} of {arguments.epochs} epochs after {arguments.warm_up} to warm up"
    return setting(shown(module, argv), {"threads": threads, "repeats": repeats})


def allocator(arguments: argparse.Namespace) -> str:
    """The name of the allocator that all processes have."""
    return "mimalloc" if "mimalloc" in os.environ.get("LD_PRELOAD", "") else str(arguments.allocator)


def shown(module: str, argv: Sequence[str]) -> str:
    """The command line, without the paths of this machine."""
    kept, skip = [], False
    for word in argv:
        if not skip and word.split("=")[0] not in PATHS:
            kept.append(word)
        skip = word in PATHS
    return f"`{shlex.join(['python', '-m', module, *kept])}`"


@contextlib.contextmanager
def work_directory(given: Path | None) -> Iterator[Path]:
    """The directory that was asked for, or one that goes when the benchmark ends."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="sar-benchmarks-") as folder:
        yield Path(folder)


def run_main(main: Callable[[Sequence[str]], None]) -> None:
    """Run a benchmark on the command line's arguments; errors of sar end it with one line."""
    try:
        main(sys.argv[1:])
    except SarError as error:
        sys.exit(f"benchmark: {error}")
