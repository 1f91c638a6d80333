"""`sar partition`: divide a graph that may be larger than memory, and write a directory that DGL and sar read."""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from tqdm import tqdm

from sar.comm import initialize_comms
from sar.comm.launcher import find_place
from sar.config import Config
from sar.errors import ConfigError
from sar.partition.pipeline import IN_EDGES, PartitionOptions, run_partition
from sar.partition.team import Team
from sar.partition.write import PartitionReport
from sar.partition.write_job import Progress

HELP = "Divide a graph that may be larger than memory, and write a directory that DGL, DistDGL and sar read."

_WHOLE_DAY = 86_400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `sar partition` takes."""
    parser.add_argument("input", metavar="INPUT", help="a file, a directory or a pattern of files")
    parser.add_argument("--parts", type=int, required=True, metavar="P", help="number of parts, one for each worker")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to make")
    parser.add_argument("--name", help="of the graph; default: of the input's file")
    parser.add_argument("--method", default="auto", help="what assigns nodes to parts (%(default)s)")
    parser.add_argument(
        "--memory", type=_bytes, metavar="BYTES", help="to use beyond Python and its libraries, for instance 2GiB"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the method (%(default)s)")
    parser.add_argument(
        "--balance",
        nargs="+",
        default=[],
        metavar="FIELD",
        help=f"node fields that parts share evenly, for instance train_mask; {IN_EDGES} for edges",
    )
    parser.add_argument(
        "--imbalance",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="how much larger than the mean a part may be (%(default)s)",
    )
    parser.add_argument("--assignment", type=Path, metavar="DIR", help="take this assignment: NTYPE.txt for each type")
    parser.add_argument("--write-assignment", type=Path, metavar="DIR", help="write the assignment in that form")
    for kind, form in (("node", "[NTYPE/]NAME=FILE"), ("edge", "[NTYPE:RELATION:NTYPE/]NAME=FILE")):
        parser.add_argument(f"--{kind}-feature", action="append", default=[], metavar=form, help="a field more")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on where a run that was killed, or failed with this option, has stopped (DIR.partial)",
    )
    parser.add_argument(
        "--local-output", action="store_true", help="with several processes: each host has its own disk for DIR"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the directory, say what is in it, and return 0."""
    place = find_place()
    if place is not None and place.world_size > 1:
        # The others wait while the first one assigns; if one dies, the rest hear of it at once.
        Config.timeout = max(Config.timeout, _WHOLE_DAY)
        initialize_comms(backend="gloo")
    report = _with_progress(_options(arguments))
    if Team.here().rank == 0:
        print(_said(report))
    return 0


def _options(arguments: argparse.Namespace) -> PartitionOptions:
    given = vars(arguments) | {
        "name": arguments.name or Path(arguments.input).name.partition(".")[0] or "graph",
        "balance": tuple(arguments.balance),
        "node_features": _named("--node-feature", arguments.node_feature),
        "edge_features": _named("--edge-feature", arguments.edge_feature),
    }
    return PartitionOptions(**{field.name: given[field.name] for field in fields(PartitionOptions)})


def _named(option: str, pairs: Sequence[str]) -> dict[str, str]:
    """Files by field."""
    named: dict[str, str] = {}
    for pair in pairs:
        name, equals, file = pair.partition("=")
        if not (name and equals and file):
            raise ConfigError(f"{option} {pair}: expected NAME=FILE.")
        if name in named:
            raise ConfigError(f"{option} {pair}: there is a file for {name} already, {named[name]}.")
        named[name] = file
    return named


def _bytes(text: str) -> int:
    """A number of bytes: 2GiB, 500 MB, 1000000."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([kmgt]?)(i?)b?", text.lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"'{text}' is no size; expected for instance 2GiB, 500MB or 1000000")
    power = "kmgt".find(found[2]) + 1 if found[2] else 0
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def _with_progress(options: PartitionOptions) -> PartitionReport:
    """Run under a bar for each stage, where the first process has a terminal."""
    if Team.here().rank or not sys.stderr.isatty():
        return run_partition(options)
    with tqdm(total=1.0, bar_format="{desc:40} {percentage:3.0f}% |{bar}| {elapsed}", leave=False) as bar:
        return run_partition(options, _shown_on(bar))


def _shown_on(bar: "tqdm[None]") -> Progress:
    def show(doing: str, share: float) -> None:
        if doing != bar.desc:
            bar.reset()
            bar.set_description_str(doing, refresh=False)
        bar.n = share
        bar.refresh()

    return show


def _said(report: PartitionReport) -> str:
    lines = [f"{'part':>6} {'nodes':>14} {'edges into it':>16}"]
    sizes = zip(report.nodes, report.edges, strict=True)
    lines += [f"{part:>6} {nodes:>14,} {edges:>16,}" for part, (nodes, edges) in enumerate(sizes)]
    lines.append(f"{report.edge_cut:.1%} of the edges lead from one part into another.")
    return "\n".join([*lines, f"wrote {report.json_file}"])
