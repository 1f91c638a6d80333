"""`sar chunk`: write a graph in DGL's chunked format, which the tools of DGL's pipeline and `sar partition` read."""

import argparse

from sar.cli.graph_input import default_name, input_of
from sar.partition.ingest.chunked import write_chunks
from sar.partition.ingest.sources import METADATA
from sar.partition.new_directory import new_directory


def run(arguments: argparse.Namespace) -> int:
    """Write the files, print the name of their `metadata.json`, and return 0."""
    with new_directory(arguments.out) as directory:
        graph = input_of(arguments)(directory.scratch)
        name = default_name(arguments) or graph.name or "graph"
        write_chunks(graph, directory.path, name, arguments.chunks)
    print("\n".join([*graph.notes, f"wrote {directory.target / METADATA}"]))
    return 0
