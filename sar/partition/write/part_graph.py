"""The structure of one part, in DGL's numbers: its own nodes first, then the halo, both in the order of new IDs."""

from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from sar.common_tuples import EID, ETYPE, NID, NTYPE
from sar.partition.graph_data import Array
from sar.partition.write.edge_buckets import EdgeBuckets
from sar.partition.write.outer_edges import OuterEdges
from sar.partition.write.write_job import WriteJob
from sar.storage.binary_layout import ArraySpec, FileLayout, tensor_file_layout
from sar.storage.partition_writer import GRAPH, ORIGINAL_EDGES, part_folder, part_graph_layout

_NODE_BYTES = 64  # with all fields and copies


def write_part_graph(job: WriteJob, buckets: EdgeBuckets, part: int, local: Array) -> tuple[list[int], list[int]]:
    """Write a part's nodes, the edges into them, those that it keeps of others, their halo, and original edge IDs.

    Args:
        job: what is written.
        buckets: its edges.
        part: the part.
        local: a table of (N,) integers to work with, overwritten: the number inside the part of every new ID.

    Returns:
        By the part of their source the number of edges, (P,), and of distinct sources, (P,), 0 for the part itself.
    """
    edges_from, rows_from = _mark_halo(job, buckets, part, local)
    start, end = job.numbering.bounds(part)
    outer = OuterEdges(job, buckets, part)
    outer.find(local)
    halo = np.count_nonzero(local[:start]) + np.count_nonzero(local[end:])
    layout = part_graph_layout(end - start + halo, int(buckets.counts[part].sum()) + outer.count)
    path = part_folder(job.staging.path, part) / GRAPH
    layout.create(path)
    with path.open("r+b") as file:
        _fill_nodes(job, file, layout, part, local)
        _fill_edges(buckets, outer, file, layout, part, local)
    outer.remove()
    _write_original_edges(job, buckets, part)
    return edges_from, rows_from


def _mark_halo(job: WriteJob, buckets: EdgeBuckets, part: int, local: Array) -> tuple[list[int], list[int]]:
    """Set `local` to 1 at the nodes of other parts that this one reads, else to 0."""
    bounds = [job.numbering.bounds(other) for other in range(job.num_parts)]
    ends = np.array([end for _, end in bounds])
    edges_from = np.zeros(job.num_parts, np.int64)
    local[:] = 0
    for _, edges in buckets.read(part):
        src = edges[:, 0]
        edges_from += np.bincount(np.searchsorted(ends, src, side="right"), minlength=job.num_parts)
        local[src] = 1
    local[slice(*bounds[part])] = 0
    return edges_from.tolist(), [int(np.count_nonzero(local[slice(*span)])) for span in bounds]


def _fill_nodes(job: WriteJob, file: BinaryIO, layout: FileLayout, part: int, local: Array) -> None:
    """Fill in the fields of nodes, and number them in `local`, in which the halo is marked."""
    new_ids, types, owners, inner = (
        layout.writer(file, f"node/{name}") for name in (NID, NTYPE, "part_id", "inner_node")
    )
    start, end = job.numbering.bounds(part)
    ends = job.numbering.ranges[..., 1].reshape(-1)  # by part, then type
    num_types = job.numbering.ranges.shape[1]
    numbered = 0
    for ids in _own_then_halo(local, start, end, job.rows_in_slice(_NODE_BYTES)):
        local[ids] = np.arange(numbered, numbered + len(ids))
        numbered += len(ids)
        part_and_type = np.searchsorted(ends, ids, side="right")
        new_ids.append(ids)
        types.append(part_and_type % num_types)
        owners.append(part_and_type // num_types)
        inner.append((ids >= start) & (ids < end))


def _own_then_halo(local: Array, start: int, end: int, rows: int) -> Iterator[Array]:
    """New IDs of a part's own nodes [start, end), and then of those marked outside of it, `rows` at a time."""
    for first in range(start, end, rows):
        yield np.arange(first, min(end, first + rows))
    for low, high in ((0, start), (end, len(local))):
        for first in range(low, high, rows):
            yield first + np.flatnonzero(local[first : min(high, first + rows)])


def _fill_edges(
    buckets: EdgeBuckets, outer: OuterEdges, file: BinaryIO, layout: FileLayout, part: int, local: Array
) -> None:
    first_id = int(buckets.ranges[part, 0, 0])
    sources, destinations = (layout.writer(file, name) for name in ("src", "dst"))
    new_ids, types, inner = (layout.writer(file, f"edge/{name}") for name in (EID, ETYPE, "inner_edge"))
    for number, edges in buckets.read(part):
        sources.append(local[edges[:, 0]])
        destinations.append(local[edges[:, 1]])
        new_ids.append(np.arange(first_id, first_id + len(edges)))
        types.append(np.full(len(edges), number))
        inner.append(np.ones(len(edges)))
        first_id += len(edges)
    for edges in outer.read():
        for writer, column in zip((sources, destinations), edges[:, :2].T, strict=True):
            writer.append(local[column])
        new_ids.append(edges[:, 2])
        types.append(edges[:, 3])
        inner.append(np.zeros(len(edges)))


def _write_original_edges(job: WriteJob, buckets: EdgeBuckets, part: int) -> None:
    names = [":".join(etype) for etype in job.etypes]
    counts = buckets.counts[part].tolist()
    int64 = np.dtype("<i8")
    layout = tensor_file_layout({name: ArraySpec(int64, (count,)) for name, count in zip(names, counts, strict=True)})
    path = part_folder(job.staging.path, part) / ORIGINAL_EDGES
    layout.create(path)
    with path.open("r+b") as file:
        writers = [layout.writer(file, name) for name in names]
        for number, edges in buckets.read(part):
            writers[number].append(edges[:, 2])
