"""`sar inspect`: shows the content of a partition directory, and checks it."""

import argparse
import json
from pathlib import Path

from sar.errors import PartitionError
from sar.partition.inspect.inspection import by_worker, inspect_directory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `sar inspect`."""
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR_OR_JSON", help="a partition directory, or its JSON file")
    add("--workers", type=int, metavar="W", help="also show what each of so many workers would hold and exchange")
    add("--values", action="store_true", help="also look for NaN in features")
    add("--verify", action="store_true", help="also compare every byte with the parts' checksums")
    add("--allow-outside", action="store_true", help="read files outside of the directory, too")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    add("--picture", type=Path, metavar="PNG", help="draw who sends how many rows to whom")


def run(arguments: argparse.Namespace) -> int:
    """Print the report; the exit status is 1 if the directory is not sound."""
    try:
        report = inspect_directory(
            arguments.directory, values=arguments.values, verify=arguments.verify, allow_outside=arguments.allow_outside
        )
    except PartitionError as error:
        if not arguments.json:
            raise
        print(json.dumps({"problems": [str(error)]}))
        return 1
    found, text = report.summary(), report.as_text()
    if arguments.workers is not None and not report.problems:
        directory, outside = arguments.directory, arguments.allow_outside
        on_workers, shares, _ = by_worker(directory, report, arguments.workers, allow_outside=outside)
        found["workers"] = on_workers.figures | {"shares": [share._asdict() for share in shares]}
        names = ["worker: parts", *(f"{worker}: {_run(share.parts)}" for worker, share in enumerate(shares))]
        text = f"{text}\n\n{on_workers.parts_as_text(names)}"
    if not report.problems and not arguments.verify:
        text += "\n(structure only: --verify also compares every byte with its checksum)"
    print(json.dumps(found) if arguments.json else text)
    if arguments.picture is not None:
        from sar.partition.inspect.directory_report import draw_traffic  # needs matplotlib

        draw_traffic(report, arguments.picture)
    return 1 if report.problems else 0


def _run(parts: list[int]) -> str:
    return str(parts[0]) if len(parts) == 1 else f"{parts[0]}-{parts[-1]}"
