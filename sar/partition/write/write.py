"""Writes a graph that may be larger than memory as a partition directory, which DGL, DistDGL and sar read."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sar.common_tuples import StrPath
from sar.data.arrays import Array
from sar.data.checksums import write_sums
from sar.data.partition_json import PART_FILES, PartitionJson, part_folder
from sar.partition.graph_source import GraphSource, Progress, logged_stages
from sar.partition.ingest.objects import from_object
from sar.partition.inspect.inspection import inspect_directory
from sar.partition.inspect.report import DirectoryReport
from sar.partition.new_directory import NewDirectory, new_directory
from sar.partition.write.divide import EdgeBuckets, write_edge_fields, write_node_fields
from sar.partition.write.part_graph import write_part_graph
from sar.partition.write.write_job import (
    NodeNumbering,
    OutputOptions,
    WriteJob,
    allow_open_files,
    check_writable,
    slice_bytes,
)


class PartitionReport(NamedTuple):
    """The result of partitioning."""

    json_file: Path  # for `sar.load_dgl_partition_data`
    nodes: list[int]  # by part
    edges: list[int]  # in-edges by part
    edge_cut: float  # fraction of edges between parts, 0 to 1

    @classmethod
    def of(cls, json_file: Path, sizes: Array) -> "PartitionReport":
        """Create a report from the result of `part_sizes`."""
        nodes, edges, cut = sizes.tolist()
        return cls(json_file, nodes, edges, sum(cut) / max(1, sum(edges)))


def write_partitions(
    graph: GraphSource | Any,
    part_of: Array,
    num_parts: int,
    out_dir: StrPath,
    name: str,
    *,
    method: str,
    memory: int | None = None,
    num_hops: int | None = None,
    progress: Progress | None = None,
) -> PartitionReport:
    """Write the parts of a graph in the format of `dgl.distributed`.

    After `sar.initialize_comms` all workers call this together. Worker 0 writes, and the others wait for up to
    `sar.Config.timeout` seconds.

    Args:
        graph: the graph, also in memory as for `partition_graph`. It is read one slice at a time.
        part_of: (N,) the part of every node, 0 to P - 1, in order of node types.
        num_parts: P.
        out_dir: directory to create, by way of `out_dir.partial`. It must not exist, or be empty.
        name: name of the JSON file, `name.json`, next to the directories `part0`, `part1`, ...
        method: name of the partition method, for the JSON file.
        memory: bytes that the process may add. Default None: slices of 32 MiB.
        num_hops: H. Also keep a halo of H hops against the direction of the edges, and the edges out of own nodes, as
            `dgl.distributed.partition_graph` does. Takes H passes over all edges for each part. Default None: only
            edges into own nodes, which is all that sar reads.
        progress: called periodically with the current stage and its completed fraction, 0 to 1. Default None: stages
            are logged.

    Raises:
        ConfigError: an argument is invalid, memory is too small, or `out_dir` is not empty.
        PartitionError: an edge ends at no node, or the disk is full.
    """
    graph, output = from_object(graph), OutputOptions(Path(os.path.abspath(out_dir)), name, memory, num_hops)

    def write() -> Array:
        with new_directory(output.directory) as directory:
            check_writable(graph, output)
            told = progress or logged_stages()
            return part_sizes(write_parts(directory, graph, part_of, num_parts, method, output, told))

    call = "partitioning (sar.write_partitions), which all workers do together"
    return PartitionReport.of(output.directory / f"{name}.json", by_worker_0(call, write, (3, num_parts)))


def part_sizes(report: DirectoryReport) -> Array:
    """The numbers of nodes, in-edges and cut in-edges by part, (3, P) int64."""
    nodes, edges = [part.num_nodes for part in report.parts], [part.num_edges for part in report.parts]
    return np.array([nodes, edges, report.cut_edges], np.int64)


def by_worker_0(call: str, work: Callable[[], Array], shape: tuple[int, ...]) -> Array:
    """Run a function on worker 0 while other workers wait; return its result, int64 of this shape, on all workers."""
    import torch  # which `sar partition` does not need

    from sar.comm import session

    if not session.has_peers():
        return work()
    group = session.current_group()
    with group.guard():
        group.agree(call)
        found = torch.from_numpy(work()) if group.rank == 0 else torch.empty(shape, dtype=torch.int64, device="cpu")
        group.agree(f"{call}: all is written")
        found = found.to(group.device)
        group.broadcast(found, call)
    return found.cpu().numpy()


def write_parts(
    directory: NewDirectory,
    graph: GraphSource,
    part_of: Array,
    num_parts: int,
    method: str,
    output: OutputOptions,
    progress: Progress,
    place: Array | None = None,
) -> DirectoryReport:
    """Write the parts into a directory under construction; arguments are as in `write_partitions`.

    place: as in `NodeNumbering.of`.

    The report equals that of `inspect_directory`, without reading the graphs again.
    """
    name, size = output.name, slice_bytes(graph.total_nodes, num_parts, output.memory, 2 if place is None else 4)
    allow_open_files(num_parts)
    numbering = NodeNumbering.of(graph, part_of, num_parts, place)
    job = WriteJob(directory, graph, numbering, size, progress, output.num_hops)
    folders = [part_folder(directory.path, part) for part in range(num_parts)]
    buckets = EdgeBuckets(job)
    write_node_fields(job)
    write_edge_fields(job, buckets)
    local = np.empty_like(job.numbering.new_id)
    counts = np.zeros((2, len(job.etypes), num_parts, num_parts), np.int64)
    rows_from = []
    for part, folder in enumerate(folders):
        job.progress("writing parts", part / num_parts)
        counts[:, :, part], rows = write_part_graph(job, buckets, part, local)
        rows_from.append(rows)
        write_sums(folder)
    columns = {ntype: graph.node_data.get(ntype, {}) for ntype in job.ntypes}
    columns |= {":".join(etype): graph.edge_data.get(etype, {}) for etype in job.etypes}
    json_file = job.directory.path / f"{name}.json"
    PartitionJson(
        path=json_file,
        name=name,
        method=method,
        halo_hops=job.num_hops or 1,
        node_types=job.ntypes,
        edge_types=job.etypes,
        node_ranges=job.numbering.ranges,
        edge_ranges=buckets.ranges,
        files=[{kind: folder / file for kind, file in PART_FILES.items()} for folder in folders],
        bool_fields=[
            f"{kind}/{key}" for kind, fields in columns.items() for key, one in fields.items() if one.dtype.kind == "b"
        ],
        counts=counts,
    ).write()
    report = inspect_directory(json_file, graphs=False)
    edges_from = counts[0].sum(0).tolist()
    parts = [
        replace(part, edges_from=edges, rows_from=rows)
        for part, edges, rows in zip(report.parts, edges_from, rows_from, strict=True)
    ]
    return replace(report, parts=parts)
