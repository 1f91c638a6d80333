"""`sar partition`: divide a graph that may be larger than memory, and write a directory that DGL and sar read."""

import argparse
import contextlib
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from sar.cli.sizes import parse_bytes
from sar.comm import initialize_comms
from sar.comm.launcher import find_place
from sar.config import Config
from sar.errors import ConfigError
from sar.partition.assign.assigning import AUTO, IN_EDGES, AssigningOptions
from sar.partition.assign.methods import method_names
from sar.partition.graph_source import Progress
from sar.partition.ingest.files import FORMATS
from sar.partition.pipeline import InputOptions, Outcome, OutputOptions, run_partition
from sar.partition.write.team import Team

HELP = "Divide a graph that may be larger than memory, and write a directory that DGL, DistDGL and sar read."

_TYPED = re.compile(r"([^:=/]+:[^:=/]+:[^:=/]+)=(.+)")
_WHOLE_DAY = 86_400.0
T = TypeVar("T", InputOptions, AssigningOptions, OutputOptions)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `sar partition` takes."""
    parser.add_argument(
        "input",
        nargs="+",
        metavar="INPUT",
        help="files in order, a directory or a pattern; or edges of several types: NTYPE:RELATION:NTYPE=FILE ...",
    )
    parser.add_argument("--parts", type=int, required=True, metavar="P", help="number of parts, one for each worker")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to make")
    parser.add_argument("--name", help="of the graph and of its JSON file; default: that of the first input file")
    parser.add_argument(
        "--memory", type=parse_bytes, metavar="SIZE", help="to use beside Python and its libraries, such as 2GiB"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on where a run has stopped that was killed, or failed with --resume"
    )
    parser.add_argument(
        "--local-output", action="store_true", help="with several processes: each host has its own disk for DIR"
    )
    _add_assigning(parser.add_argument_group("assignment"))
    _add_input(parser.add_argument_group("input"))


def _add_assigning(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--method", default=AUTO, metavar="METHOD", help=f"{', '.join(method_names())} (%(default)s: by --memory)"
    )
    group.add_argument("--seed", type=int, default=0, help="of the method (%(default)s)")
    group.add_argument(
        "--balance",
        nargs="+",
        default=[],
        metavar="FIELD",
        help=f"node fields that parts share evenly, for instance train_mask; or {IN_EDGES}",
    )
    group.add_argument(
        "--imbalance",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="how much larger than the mean a part may be (%(default)s)",
    )
    group.add_argument("--assignment", type=Path, metavar="DIR", help="take this one: NTYPE.txt for each type")
    group.add_argument("--write-assignment", type=Path, metavar="DIR", help="write the assignment in that form")


def _add_input(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--format", choices=FORMATS, help="default: by the names of the files")
    group.add_argument(
        "--num-nodes", action="append", default=[], metavar="[NTYPE=]N", help="of edge lists; default: by their IDs"
    )
    for kind, form in (("node", "[NTYPE/]NAME=FILE"), ("edge", "[NTYPE:RELATION:NTYPE/]NAME=FILE")):
        group.add_argument(f"--{kind}-feature", action="append", default=[], metavar=form, help="one more field")
    group.add_argument("--delimiter", help="of edges as text; default: found out")
    group.add_argument(
        "--header", action=argparse.BooleanOptionalAction, help="whether text begins with names; default: found out"
    )
    group.add_argument("--columns", nargs=2, metavar=("SRC", "DST"), help="of text and Parquet, by name or number")
    group.add_argument("--dtype", choices=["int32", "int64"], help="of raw binary edges")
    group.add_argument("--allow-nan", action="store_true", help="take NaN in features")
    group.add_argument("--undirected", action="store_true", help="give every edge its reverse")
    group.add_argument("--remove-duplicates", action="store_true", help="keep one of edges with the same ends")
    loops = group.add_mutually_exclusive_group()
    for what in ("remove", "add"):
        loops.add_argument(
            f"--{what}-self-loops", dest="self_loops", action="store_const", const=what, default="keep", help="all"
        )


def run(arguments: argparse.Namespace) -> int:
    """Write the directory, print the report, and return 0."""
    place = find_place()
    if place is not None and place.world_size > 1:
        # The others wait while the first one assigns; if one dies, the rest hear of it at once.
        Config.timeout = max(Config.timeout, _WHOLE_DAY)
        initialize_comms(backend="gloo")
    with _stoppable():
        outcome = _with_progress(arguments)
    if Team.here().rank == 0:
        print(f"{outcome.report.as_text()}\n\nmethod {outcome.assigned.method or 'unknown'}: {outcome.assigned.why}")
        print(f"wrote {outcome.json_file}")
    return 0


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Let SIGTERM, which launchers send when another process has failed, end the run like Ctrl-C: it cleans up."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _with_progress(arguments: argparse.Namespace) -> Outcome:
    """Run under a bar for each stage, where the first process has a terminal."""
    assigning = _options(AssigningOptions, arguments, balance=tuple(arguments.balance))
    options = _input_options(arguments), assigning, _output_options(arguments)
    if Team.here().rank or not sys.stderr.isatty():
        return run_partition(*options)
    with tqdm(total=1.0, bar_format="{desc:40} {percentage:3.0f}% |{bar}| {elapsed}", leave=False) as bar:
        return run_partition(*options, progress=_shown_on(bar))


def _shown_on(bar: "tqdm[None]") -> Progress:
    stage = ""

    def show(doing: str, share: float) -> None:
        nonlocal stage
        if doing != stage:
            stage = doing
            bar.reset()
            bar.set_description_str(doing, refresh=False)
        bar.update(share - bar.n)

    return show


def _options(kind: type[T], arguments: argparse.Namespace, **converted: Any) -> T:
    """Options whose fields are the arguments of the same names, but for those that are converted."""
    given = {one.name: getattr(arguments, one.name) for one in fields(kind) if one.name not in converted}
    return kind(**given, **converted)


def _input_options(arguments: argparse.Namespace) -> InputOptions:
    columns = [int(name) if name.isdigit() else name for name in arguments.columns or ()]
    return _options(
        InputOptions,
        arguments,
        path=_path(arguments.input),
        num_nodes=_num_nodes(arguments.num_nodes),
        node_features=_named("--node-feature", arguments.node_feature),
        edge_features=_named("--edge-feature", arguments.edge_feature),
        columns=tuple(columns) or None,
    )


def _output_options(arguments: argparse.Namespace) -> OutputOptions:
    file = _TYPED.sub(r"\2", arguments.input[0])
    name = arguments.name or Path(file).absolute().name.partition(".")[0] or "graph"
    return _options(OutputOptions, arguments, directory=arguments.out, name=name)


def _path(inputs: Sequence[str]) -> str | list[str] | dict[str, str]:
    """One input, several files, or files by edge type."""
    typed = [_TYPED.fullmatch(one) for one in inputs]
    if all(typed):
        return _named("INPUT", inputs)
    if any(typed):
        untyped = [one for one, match in zip(inputs, typed, strict=True) if match is None]
        raise ConfigError(f"{', '.join(untyped)}: expected NTYPE:RELATION:NTYPE=FILE, as in the other inputs.")
    return inputs[0] if len(inputs) == 1 else list(inputs)


def _num_nodes(given: Sequence[str]) -> int | dict[str, int] | None:
    """One number, or one by type."""
    one = len(given) == 1 and "=" not in given[0]
    named = {"": given[0]} if one else _named("--num-nodes", given)
    try:
        counts = {ntype: int(count) for ntype, count in named.items()}
    except ValueError as error:
        raise ConfigError(
            f"--num-nodes {' '.join(given)}: expected a number, or NTYPE=NUMBER for each type."
        ) from error
    return counts[""] if one else counts or None


def _named(option: str, pairs: Sequence[str]) -> dict[str, str]:
    """What is given as NAME=VALUE, by name."""
    named: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"{option} {pair}: expected NAME=VALUE.")
        if name in named:
            raise ConfigError(f"{option} {pair}: there is {named[name]} for {name} already; name each once.")
        named[name] = value
    return named
