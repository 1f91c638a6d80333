"""Common parts of the benchmarks' command lines: options, the work directory, and errors."""

import argparse
import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.graphs import DATA, GeneratedSize
from benchmarks.measure import Job
from benchmarks.models import MODELS
from benchmarks.report import DOCS, setting
from benchmarks.runs import Plan, Way
from sar.errors import SarError

PATHS = ("--work", "--docs", "--data")


def new_parser(
    module: str, description: str | None, *, generates: bool = True, repeats: int = 3
) -> argparse.ArgumentParser:
    """A parser with the options for paths, for the generated graph, if any, and for repeats, unless 0."""
    size, raw = GeneratedSize(), argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description, formatter_class=raw)
    parser.set_defaults(module=module)
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep and reuse graphs and partitions here")
    parser.add_argument("--docs", type=Path, default=DOCS, metavar="DIR", help="page and picture go here")
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR", help="folder of real graphs (.npz)")
    parser.add_argument("--time-limit", type=float, default=900, metavar="S", help="limit of a run (%(default)s)")
    if repeats:
        parser.add_argument("--repeats", type=int, default=repeats, metavar="N", help="runs of each row (%(default)s)")
    if generates:
        parser.add_argument("--nodes", type=int, default=size.nodes, metavar="N", help="of the generated graph")
        parser.add_argument("--edges", type=int, default=size.edges, metavar="N", help="of the generated graph")
        parser.add_argument(
            "--features", type=int, default=size.features, metavar="F", help="width of random features (%(default)s)"
        )
        parser.add_argument("--seed", type=int, default=0, help="of graph, split and parameters (%(default)s)")
    return parser


def add_training(parser: argparse.ArgumentParser, workers: Sequence[int]) -> None:
    """Declare the options of full-graph training."""
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="(all)")
    parser.add_argument("--workers", nargs="+", type=int, default=list(workers), metavar="W", help="(%(default)s)")
    parser.add_argument("--epochs", type=int, default=5, metavar="N", help="timed epochs (%(default)s)")
    parser.add_argument("--warm-up", type=int, default=2, metavar="N", help="epochs before (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of all workers (%(default)s)")
    parser.add_argument(
        "--allocator",
        choices=("least", "kept", "system"),
        default="least",
        help="Config.allocator of all processes, with or without sar; overridden by LD_PRELOAD (%(default)s)",
    )
    parser.add_argument("--wire", choices=("bfloat16",), help="Config.wire_dtype_features and _gradients")


def size_of(arguments: argparse.Namespace) -> GeneratedSize:
    """The size of the generated graph."""
    return GeneratedSize(arguments.nodes, arguments.edges, arguments.features)


def plan_of(arguments: argparse.Namespace, ways: Sequence[Way]) -> Plan:
    """The plan that the options describe."""
    job = Job("", 0, arguments.warm_up, arguments.epochs, arguments.seed)
    job = Job(**vars(job) | {"wire": arguments.wire, "allocator": arguments.allocator})
    return Plan(arguments.models, ways, arguments.repeats, job, arguments.threads, arguments.time_limit)


def conditions_of(argv: Sequence[str], arguments: argparse.Namespace, **more: str) -> str:
    """The settings of a training benchmark, for its page."""
    allocator = "mimalloc" if "mimalloc" in os.environ.get("LD_PRELOAD", "") else arguments.allocator
    threads = f"{arguments.threads} together, allocator {allocator}, huge pages for all"
    repeats = f"{arguments.repeats} of {arguments.epochs} epochs after {arguments.warm_up} to warm up"
    return setting(shown(arguments.module, argv), {"threads": threads, "repeats": repeats, **more})


def shown(module: str, argv: Sequence[str]) -> str:
    """The command line without the options for paths."""
    kept, skip = [], False
    for word in argv:
        if not skip and word.split("=")[0] not in PATHS:
            kept.append(word)
        skip = word in PATHS
    return f"`{shlex.join(['python', '-m', module, *kept])}`"


@contextlib.contextmanager
def work_directory(given: Path | None) -> Iterator[Path]:
    """The given directory, or a temporary one."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="sar-benchmarks-") as folder:
        yield Path(folder)


def run_main(main: Callable[[Sequence[str]], None]) -> None:
    """Run a benchmark on the command line's arguments; an error of sar prints one line."""
    try:
        main(sys.argv[1:])
    except SarError as error:
        sys.exit(f"benchmark: {error}")
