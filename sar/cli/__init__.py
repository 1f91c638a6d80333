"""The command line: one command of `sar` after the other."""

import argparse
import sys
from collections.abc import Sequence

from sar.cli import chunk, demo, inspect, launch, partition, plan
from sar.errors import SarError

COMMANDS = {"chunk": chunk, "demo": demo, "inspect": inspect, "launch": launch, "partition": partition, "plan": plan}
"""Each command is a module with `HELP`, `add_arguments(parser)` and `run(arguments)`, which returns the exit status."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: the command's own, or 1 after an error of sar.

    Args:
        argv: arguments without the program's name; None takes them from the command line.
    """
    parser = argparse.ArgumentParser(prog="sar", description="Train graph neural networks on whole graphs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
    arguments = parser.parse_args(argv)
    try:
        status: int = COMMANDS[arguments.command].run(arguments)
    except SarError as error:
        print(f"sar {arguments.command}: {error}", file=sys.stderr)
        return 1
    return status
