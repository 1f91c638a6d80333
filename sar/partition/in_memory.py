"""Divide a graph that is in memory with METIS: what the examples and the demo do in one call."""

import tempfile
from os import PathLike
from pathlib import Path

from sar.errors import ConfigError
from sar.partition.assign.assigning import IN_EDGES, balance_weights
from sar.partition.assign.assignment import AssignmentTask
from sar.partition.assign.metis import metis
from sar.partition.graph_data import GraphData, HeteroGraphData
from sar.partition.ingest import from_memory
from sar.partition.write.write import PartitionReport, write_partitions


def partition_graph(
    data: GraphData | HeteroGraphData, out_dir: str | PathLike[str], name: str, num_parts: int
) -> PartitionReport:
    """Divide a graph with METIS, balancing nodes and in-edges, and write it in the format of `dgl.distributed`.

    Args:
        data: the whole graph; all its node fields are written.
        out_dir: directory to make; an empty one is replaced.
        name: the directory gets `name.json` and `part0`, `part1`, ...
        num_parts: number of parts, which is the number of workers that can train on them.

    Raises:
        ConfigError: the number of parts does not fit, or there is something in the directory already.
    """
    graph = from_memory(data)
    if not 1 <= num_parts <= graph.total_nodes:
        expected = f"expected 1 to {graph.total_nodes}"
        raise ConfigError(f"cannot divide {graph.total_nodes} nodes into {num_parts} parts; {expected}.")
    with tempfile.TemporaryDirectory() as scratch:
        part_of = metis(AssignmentTask(graph, num_parts, Path(scratch), weights=balance_weights(graph, [IN_EDGES])))
    return write_partitions(graph, part_of, num_parts, out_dir, name, method="metis")
