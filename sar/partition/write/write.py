"""Writes a graph that may be larger than memory as a partition directory, which DGL, DistDGL and sar read."""

import hashlib
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sar.common_tuples import SPLIT, StrPath
from sar.data.arrays import Array
from sar.data.checksums import write_sums
from sar.data.partition_json import ORIGINAL_EDGES, ORIGINAL_NODES, PART_FILES, PartitionJson, part_folder
from sar.id_slices import pieces
from sar.partition.graph_source import CHUNK_ROWS, GraphSource, Progress, logged_stages
from sar.partition.ingest.objects import from_object
from sar.partition.inspect.directory_report import DirectoryReport, FeatureReport, PartReport
from sar.partition.write.divide import EdgeBuckets, write_edge_fields, write_node_fields
from sar.partition.write.part_graph import write_part_graph
from sar.partition.write.staging import staged
from sar.partition.write.write_job import WriteJob, check_hops, check_writable, stored_spec
from sar.partition.write.writers import Writers


class Written(NamedTuple):
    """What a directory has been given: numbers by part, and by type in their order in the graph."""

    nodes: Array  # (P, T)
    edges: Array  # (P, R)
    edges_from: Array  # (P, P) by the part that they lead into and the part that they come from
    rows_from: Array  # (P, P) distinct nodes that they come from; 0 on the diagonal

    def report(self, json_file: Path) -> "PartitionReport":
        """The sums that matter most."""
        total = int(self.edges.sum())
        cut = (total - int(self.edges_from.trace())) / max(1, total)
        return PartitionReport(json_file, self.nodes.sum(axis=1).tolist(), self.edges.sum(axis=1).tolist(), cut)


class PartitionReport(NamedTuple):
    """What came of partitioning."""

    json_file: Path  # what `sar.load_dgl_partition_data` takes
    nodes: list[int]  # in each part
    edges: list[int]  # into these
    edge_cut: float  # share of the edges that lead from one part into another, 0 to 1


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
    resume: bool = False,
    overwrite: bool = False,
    local_output: bool = False,
    progress: Progress | None = None,
) -> PartitionReport:
    """Write the parts of a graph in the format of `dgl.distributed`.

    After `sar.initialize_comms` all workers call this together, with the same arguments; each reads its share of the
    input and writes its share of the parts.

    Args:
        graph: the graph, also in memory, as `partition_graph` takes it; it is read slice by slice.
        part_of: (N,) the part of every node, 0 to P - 1; nodes are numbered type after type.
        num_parts: P.
        out_dir: directory to make; an empty one is replaced. Until it is complete it is called `out_dir.partial`.
        name: the directory gets `name.json` and `part0`, `part1`, ...
        method: what made the assignment, in a word, for the JSON file.
        memory: bytes to use at most, beside what is in use when this is called; None for slices of 32 MiB.
        num_hops: H: parts also keep edges of others, as `dgl.distributed.partition_graph` writes them: a halo of H hops
            against the direction of the edges, and the edges out of their own nodes. It takes H passes over all edges
            for each part. None: the edges into own nodes, which is all that sar reads.
        resume: go on with what an earlier call with the same input has done, if it was killed; and keep what is done if
            this one fails, which otherwise removes it. All of the input is read once more, to see that it is the same.
        overwrite: replace an earlier directory of partitions once the new one is complete.
        local_output: each host has a disk of its own, on which its workers leave their parts.
        progress: called now and then with what is being done and the share of it that is done, 0 to 1.
            Default None: the log tells of stages.

    Raises:
        ConfigError: an argument does not fit, memory is too little, or `out_dir` is taken.
        PartitionError: an edge ends at no node, the input changed, or the disk is full.
    """
    writers = Writers.here()
    with writers.guard():
        graph = from_object(graph)
        check_hops(num_hops, writers, local_output)
        digest = _digest(graph, part_of, num_parts, name, method, memory, num_hops, writers.size) if resume else ""
        with staged(Path(out_dir), writers, digest, resume=resume, overwrite=overwrite, local=local_output) as staging:
            check_writable(graph, name)
            job = WriteJob.of(staging, graph, part_of, num_parts, memory, progress or logged_stages(), num_hops)
            written = write_parts(job, name, method)
    return written.report(staging.target / f"{name}.json")


def write_parts(job: WriteJob, name: str, method: str) -> Written:
    """Write the parts into a directory in the making; `name` and `method` as in `write_partitions`."""
    staging, num_parts = job.staging, job.num_parts
    buckets = EdgeBuckets(job)
    write_node_fields(job)
    write_edge_fields(job, buckets)
    origins = np.zeros((2, num_parts, num_parts), np.int64)
    local = np.empty_like(job.numbering.new_id)
    for done, part in enumerate(job.own_parts):
        job.progress("writing parts", done / len(job.own_parts))
        step = partial(write_part_graph, job, buckets, part, local)
        origins[:, part] = staging.own_step(f"graph of part {part}", step)
        staging.own_step(f"sums of part {part}", partial(write_sums, part_folder(staging.path, part)))
    edges_from, rows_from = staging.writers.sum(origins)
    if staging.leads:
        data = {**job.graph.node_data, **{":".join(etype): fields for etype, fields in job.graph.edge_data.items()}}
        bools = [f"{kind}/{key}" for kind in data for key, column in data[kind].items() if column.dtype.kind == "b"]
        folders = [part_folder(staging.path, part) for part in range(num_parts)]
        PartitionJson(
            path=staging.path / f"{name}.json",
            name=name,
            method=method,
            halo_hops=job.num_hops or 1,
            node_types=job.ntypes,
            edge_types=[":".join(etype) for etype in job.etypes],
            node_ranges=job.numbering.ranges,
            edge_ranges=buckets.ranges,
            files=[{kind: folder / file for kind, file in PART_FILES.items()} for folder in folders],
            bool_fields=bools,
        ).write()
    nodes = job.numbering.ranges[..., 1] - job.numbering.ranges[..., 0]
    return Written(nodes, buckets.counts, edges_from, rows_from)


def _digest(graph: GraphSource, part_of: Array, *options: object) -> str:
    """Of all of the input: the graph with its fields, the assignment, and what else decides about the result."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((list(graph.num_nodes.items()), list(graph.edges), part_of.dtype.str, options)).encode())
    digest.update(np.ascontiguousarray(part_of).data)
    for edges in graph.edges.values():
        for src, dst in edges.chunks():
            digest.update(np.ascontiguousarray(src).data)
            digest.update(np.ascontiguousarray(dst).data)
    for kind, fields in (*graph.node_data.items(), *graph.edge_data.items()):
        for key, column in fields.items():
            digest.update(repr((kind, key, str(column.dtype), tuple(column.shape))).encode())
            for chunk in pieces(column.shape[0], CHUNK_ROWS >> 6):
                digest.update(np.ascontiguousarray(column[chunk]).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def written_report(graph: GraphSource, part_of: Array, written: Written, name: str, method: str) -> DirectoryReport:
    """What `sar.partition.inspect.inspection.inspect_directory` finds in a directory that was just written."""
    num_edges = {":".join(etype): edges.num_edges for etype, edges in graph.edges.items()}
    data = [("nodes", ntype, graph.node_data.get(ntype, {})) for ntype in graph.num_nodes]
    data += [("edges", ":".join(etype), graph.edge_data.get(etype, {})) for etype in graph.edges]
    split = _split(graph, part_of, len(written.nodes))
    parts = [
        PartReport(
            nodes=dict(zip(graph.num_nodes, written.nodes[part].tolist(), strict=True)),
            in_edges=dict(zip(num_edges, written.edges[part].tolist(), strict=True)),
            edges_from=written.edges_from[part].tolist(),
            rows_from=written.rows_from[part].tolist(),
            split={mask: int(counts[part]) for mask, counts in split.items()},
        )
        for part in range(len(written.nodes))
    ]
    return DirectoryReport(
        name=name,
        method=method,
        format="dgl.distributed.partition_graph",
        orig_node_ids=ORIGINAL_NODES,
        orig_edge_ids=ORIGINAL_EDGES,
        num_nodes=dict(graph.num_nodes),
        num_edges=num_edges,
        features=[
            FeatureReport(of, kind, key, stored_spec(key, column).dtype.name, tuple(column.shape[1:]), None)
            for of, kind, columns in data
            for key, column in columns.items()
        ],
        parts=parts,
        problems=[],
    )


def _split(graph: GraphSource, part_of: Array, num_parts: int) -> dict[str, Array]:
    """By mask, how many nodes it chooses in each part, (P,)."""
    chosen: dict[str, Array] = {}
    for ntype, columns in graph.node_data.items():
        parts = part_of[graph.nodes_of(ntype)]
        for mask in (mask for mask in SPLIT if mask in columns):
            counts = chosen.setdefault(mask, np.zeros(num_parts, np.int64))
            for chunk in pieces(len(parts), CHUNK_ROWS):
                counts += np.bincount(parts[chunk][np.asarray(columns[mask][chunk]) != 0], minlength=num_parts)
    return chosen
