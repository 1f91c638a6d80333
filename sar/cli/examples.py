"""`sar examples`: the scripts of `examples/`, which an installed package has inside, as files to change."""

import argparse
import shutil
from pathlib import Path

import sar
from sar.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `sar examples`."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder to make")


def run(arguments: argparse.Namespace) -> int:
    """Copy the scripts, say how to begin, and return 0."""
    package = Path(sar.__file__).parent
    inside, in_repository = package / "examples", package.parent / "examples"
    directory: Path = arguments.directory
    if directory.exists():
        raise ConfigError(f"{directory} is there already; name a folder to make.")
    source = inside if inside.is_dir() else in_repository
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("__pycache__"))
    print(
        f"copied {len(list(directory.iterdir()))} files to {directory}; to begin:\n"
        f"    python {directory}/partition_graph.py --parts 2 --out partitions/cora\n"
        f"    sar launch {directory}/full_graph.py --partition-json partitions/cora"
    )
    return 0
