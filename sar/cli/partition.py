"""`sar partition`: partitions a graph that may be larger than memory into a directory for DGL and sar."""

import argparse

from sar.cli.graph_input import default_name, input_of, options_of, progress_bar
from sar.errors import ConfigError
from sar.host.memory import machine_memory
from sar.partition.assign.assigning import Assigned, AssigningOptions, PartsByMemory
from sar.partition.pipeline import run_assignment, run_partition
from sar.partition.write.write_job import OutputOptions


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
