"""`sar partition`: divide a graph that may be larger than memory, and write a directory that DGL and sar read."""

import argparse
from pathlib import Path

from sar.cli.graph_input import add_input, default_name, input_of, options_of, progress_bar, size
from sar.errors import ConfigError
from sar.host.memory import machine_memory
from sar.partition.assign.assigning import IN_EDGES, METHODS, MULTILEVEL, Assigned, AssigningOptions, PartsByMemory
from sar.partition.assign.task import VOLUME_BOUND
from sar.partition.pipeline import run_assignment, run_partition
from sar.partition.write.write_job import OutputOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `sar partition`."""
    add_input(parser)
    add = parser.add_argument
    parts = "number of parts; any number of workers can train on them; auto: as --workers and their memory need"
    add("--parts", type=_parts, required=True, metavar="P", help=parts)
    add("--out", type=Path, metavar="DIR", help="directory to make")
    add("--name", help="of the graph and of its JSON file; default: its own, or that of the first file")
    add(
        "--num-hops",
        type=int,
        metavar="H",
        help="keep a halo of H hops and the edges out of each part, as dgl.distributed.partition_graph does; default: "
        "only the edges into a part, which is all that sar reads",
    )
    add = parser.add_argument_group("assignment").add_argument
    methods = ", ".join(METHODS)
    add("--method", default=MULTILEVEL, metavar="METHOD", help=f"{methods}; metis is multilevel (%(default)s)")
    add("--seed", type=int, default=0, help="of the method, and of --split (%(default)s)")
    balance = f"node fields that parts share evenly, for instance train_mask; {IN_EDGES}; or {IN_EDGES}/FIELD of edges"
    add("--balance", nargs="+", default=[], metavar="FIELD", help=balance)
    imbalance = "how much larger than the mean a part may be (%(default)s)"
    add("--imbalance", type=float, default=0.05, metavar="SHARE", help=imbalance)
    add(
        "--volume-bound",
        type=float,
        metavar="SHARE",
        help="of spring: above this sum of degrees a cluster takes no more nodes; of a part's mean sum, such as "
        f"{VOLUME_BOUND}, the default",
    )
    add("--assignment", type=Path, metavar="DIR", help="take this one: NTYPE.txt for each type")
    add("--write-assignment", type=Path, metavar="DIR", help="write the assignment in that form")
    add("--assign-only", action="store_true", help="write nothing but that: no --out")
    fitting = parser.add_argument_group("for --parts auto, such as --workers 4 --memory-per-worker 8GiB")
    add = fitting.add_argument
    add("--workers", type=int, metavar="Q", help="the fewest parts: one for each")
    memory = "that each part has to fit; default: that of this machine"
    add("--memory-per-worker", type=size, metavar="SIZE", help=memory)
    reserve = "memory that a worker needs beside graph and features (T of SDT-GNN); default: two thirds"
    add("--reserve", type=size, metavar="SIZE", help=reserve)


def _parts(text: str) -> int | str:
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of parts; expected one, such as 4, or auto")
    return text if text == "auto" else int(text)


def run(arguments: argparse.Namespace) -> int:
    """Write the directory, print the report, and return 0."""
    if (arguments.out is None) != arguments.assign_only:
        raise ConfigError("name a directory to make, --out DIR; or with --assign-only none but --write-assignment DIR.")
    balance = tuple(arguments.balance)
    assigning = options_of(AssigningOptions, arguments, parts=_number_of_parts(arguments), balance=balance, weights={})
    if arguments.assign_only:
        with progress_bar() as progress:
            assigned, notes = run_assignment(input_of(arguments, progress), assigning, arguments.memory, progress)
        print("\n".join([*_described(assigned), *notes, f"wrote {arguments.write_assignment}"]))
        return 0
    output = options_of(OutputOptions, arguments, directory=arguments.out, name=default_name(arguments))
    with progress_bar() as progress:
        outcome = run_partition(input_of(arguments, progress), assigning, output, progress)
    lines = [*_described(outcome.assigned), *outcome.notes, f"wrote {outcome.json_file}"]
    print("\n".join([outcome.report.as_text(), "", *lines]))
    return 0


def _described(assigned: Assigned) -> list[str]:
    return [f"method {assigned.method or 'unknown'}", *([assigned.why] if assigned.why else [])]


def _number_of_parts(arguments: argparse.Namespace) -> int | PartsByMemory:
    """The number, or the rule for it."""
    workers, memory, reserve = arguments.workers, arguments.memory_per_worker, arguments.reserve
    if isinstance(arguments.parts, int):
        if any(one is not None for one in (workers, memory, reserve)):
            raise ConfigError("--workers, --memory-per-worker and --reserve are for --parts auto.")
        return arguments.parts
    if workers is None:
        raise ConfigError("--parts auto takes --workers.")
    memory = machine_memory() if memory is None else memory
    return PartsByMemory(workers, memory, 2 * memory // 3 if reserve is None else reserve)
