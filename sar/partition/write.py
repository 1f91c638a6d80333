"""Divides a graph among workers and writes a partition directory."""

from os import PathLike
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sar.adapters.dgl.partition_writer import write_metis_partitions
from sar.errors import ConfigError
from sar.partition.graph_data import GraphData


class PartitionReport(NamedTuple):
    """What came of partitioning.

    json_file: what `sar.load_dgl_partition_data` takes.
    nodes, edges: number of nodes, and of edges into them, in each part.
    edge_cut: share of the edges that lead from one part into another, 0 to 1.
    """

    json_file: Path
    nodes: list[int]
    edges: list[int]
    edge_cut: float


def partition_graph(data: GraphData, out_dir: str | PathLike[str], name: str, num_parts: int) -> PartitionReport:
    """Divide a graph with METIS (Karypis and Kumar, 1998) and write it in the format of `dgl.distributed`.

    Args:
        data: the whole graph; all its node fields are written.
        out_dir: directory to make or to fill.
        name: the directory gets `name.json` and `part0`, `part1`, ...
        num_parts: number of parts, which is the number of workers that can train on them.

    Raises:
        ConfigError: the number of parts does not fit, or there are partitions in the directory already.
    """
    if not 1 <= num_parts <= data.num_nodes:
        raise ConfigError(
            f"cannot divide {data.num_nodes} nodes into {num_parts} parts; expected 1 to {data.num_nodes}."
        )
    folder = Path(out_dir)
    taken = sorted(file.name for file in (folder / f"{name}.json", *folder.glob("part[0-9]*")) if file.exists())
    if taken:
        raise ConfigError(f"'{folder}' already holds {', '.join(taken)}, and nothing is overwritten; name another one.")
    folder.mkdir(parents=True, exist_ok=True)
    parts = write_metis_partitions((data.src, data.dst), data.num_nodes, data.node_data, folder, name, num_parts)
    part_of = np.empty(data.num_nodes, dtype=np.int64)
    for part, (nodes, _) in enumerate(parts):
        part_of[nodes.numpy()] = part
    cut = int(np.count_nonzero(part_of[data.src] != part_of[data.dst])) / max(1, len(data.src))
    sizes = [(len(nodes), len(in_edges)) for nodes, in_edges in parts]
    return PartitionReport(folder / f"{name}.json", [n for n, _ in sizes], [e for _, e in sizes], cut)
