"""`sar chunk`: write a graph in DGL's chunked format, which the tools of DGL's pipeline and `sar partition` read."""

import argparse
from pathlib import Path

from sar.cli.graph_input import add_input, default_name, input_of
from sar.partition.ingest.chunked import write_chunks
from sar.partition.ingest.sources import METADATA
from sar.partition.new_directory import new_directory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `sar chunk`."""
    add_input(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to make")
    parser.add_argument("--name", help="of the graph; default: its own, or that of the first file")
    parser.add_argument("--chunks", type=int, default=1, metavar="N", help="files for each list of edges (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of --split (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Write the files, print the name of their `metadata.json`, and return 0."""
    with new_directory(arguments.out) as directory:
        graph = input_of(arguments)(directory.scratch)
        name = default_name(arguments) or graph.name or "graph"
        write_chunks(graph, directory.path, name, arguments.chunks)
    print("\n".join([*graph.notes, f"wrote {directory.target / METADATA}"]))
    return 0
