"""Divides a graph among workers and writes a partition directory."""

from os import PathLike
from pathlib import Path
from typing import NamedTuple

from sar.adapters.dgl.partition_writer import write_metis_partitions
from sar.errors import ConfigError
from sar.partition.graph_data import GraphData
from sar.partition.hetero_data import HeteroGraphData


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


def partition_graph(
    data: GraphData | HeteroGraphData, out_dir: str | PathLike[str], name: str, num_parts: int
) -> PartitionReport:
    """Divide a graph with METIS (Karypis and Kumar, 1998) and write it in the format of `dgl.distributed`.

    Args:
        data: the whole graph; all its node fields are written.
        out_dir: directory to make or to fill.
        name: the directory gets `name.json` and `part0`, `part1`, ...
        num_parts: number of parts, which is the number of workers that can train on them.

    Raises:
        ConfigError: the number of parts does not fit, or there are partitions in the directory already.
    """
    if isinstance(data, GraphData):
        data = HeteroGraphData(
            {"_N": data.num_nodes}, {("_N", "_E", "_N"): (data.src, data.dst)}, {"_N": data.node_data}
        )
    num_nodes = sum(data.num_nodes.values())
    if not 1 <= num_parts <= num_nodes:
        raise ConfigError(f"cannot divide {num_nodes} nodes into {num_parts} parts; expected 1 to {num_nodes}.")
    folder = Path(out_dir)
    taken = sorted(file.name for file in (folder / f"{name}.json", *folder.glob("part[0-9]*")) if file.exists())
    if taken:
        raise ConfigError(f"'{folder}' already holds {', '.join(taken)}, and nothing is overwritten; name another one.")
    folder.mkdir(parents=True, exist_ok=True)
    parts = write_metis_partitions(data.num_nodes, data.edges, data.node_data, folder, name, num_parts)
    num_edges = sum(part.edges for part in parts)
    cut = sum(part.cut for part in parts) / max(1, num_edges)
    return PartitionReport(folder / f"{name}.json", [p.nodes for p in parts], [p.edges for p in parts], cut)
