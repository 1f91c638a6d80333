"""`sar inspect`: shows the contents of a partition directory, and checks it."""

import argparse
import json

from sar.errors import PartitionError
from sar.partition.inspect.inspection import inspect_directory


def run(arguments: argparse.Namespace) -> int:
    """Print the report; the exit status is 1 if the directory is not sound."""
    try:
        report = inspect_directory(arguments.directory, verify=arguments.verify)
    except PartitionError as error:
        if not arguments.json:
            raise
        print(json.dumps({"problems": [str(error)]}))
        return 1
    text = report.as_text()
    if not report.problems and not arguments.verify:
        text += "\n(structure only: --verify also compares every byte with its checksum)"
    print(json.dumps(report.summary()) if arguments.json else text)
    return 1 if report.problems else 0
