"""`sar inspect`: what is in a partition directory, and is it sound."""

import argparse
import json
from pathlib import Path

from sar.errors import PartitionError
from sar.partition.inspect.inspection import inspect_directory

HELP = "Show what is in a partition directory, and check that its files fit together."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `sar inspect` takes."""
    parser.add_argument("directory", type=Path, metavar="DIR_OR_JSON", help="a partition directory, or its JSON file")
    parser.add_argument("--values", action="store_true", help="also look for NaN in features")
    parser.add_argument("--verify", action="store_true", help="also compare every byte with the parts' checksums")
    parser.add_argument("--allow-outside", action="store_true", help="read files outside of the directory, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="draw who sends how many rows to whom")


def run(arguments: argparse.Namespace) -> int:
    """Print the report; the exit status is 1 where the directory is not sound."""
    try:
        report = inspect_directory(
            arguments.directory, values=arguments.values, verify=arguments.verify, allow_outside=arguments.allow_outside
        )
    except PartitionError as error:
        if not arguments.json:
            raise
        print(json.dumps({"problems": [str(error)]}))
        return 1
    print(json.dumps(report.summary()) if arguments.json else report.as_text())
    if arguments.picture is not None:
        from sar.partition.inspect.report_picture import draw_traffic  # needs matplotlib

        draw_traffic(report, arguments.picture)
    return 1 if report.problems else 0
