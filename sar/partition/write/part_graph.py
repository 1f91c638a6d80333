"""The structure of one part, in DGL's numbers: its own nodes first, then the halo, both in the order of new IDs."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sar.adapters.dgl.writer.binary_layout import Form, Room, tensor_file_layout
from sar.adapters.dgl.writer.partition_writer import (
    EDGE_FIELDS,
    GRAPH,
    NODE_FIELDS,
    ORIGINAL_EDGES,
    part_folder,
    part_graph_layout,
)
from sar.common_tuples import EID, ETYPE, NID, NTYPE
from sar.partition.graph_data import Array
from sar.partition.write.edge_buckets import EdgeBuckets
from sar.partition.write.write_job import WriteJob

_INT64 = np.dtype("<i8")
_NODE_BYTES = 64  # with all fields and copies


class Origins(NamedTuple):
    """Where the edges into a part come from.

    edges: their number by the part of their source, (P,).
    rows: the number of distinct sources by part, (P,); 0 for the part itself.
    """

    edges: list[int]
    rows: list[int]


def write_part_graph(
    job: WriteJob, buckets: EdgeBuckets, part: int, local: Array, edge_range: tuple[int, int]
) -> Origins:
    """Write a part's nodes, the edges into them, the halo that these come from, and the edges' original IDs.

    Args:
        job: what is written.
        buckets: its edges.
        part: the part.
        local: a table of (N,) integers to work with, overwritten: the number inside the part of every new ID.
        edge_range: the part's new edge IDs [start, end).
    """
    bounds = [job.numbering.bounds(other) for other in range(job.num_parts)]
    start, end = bounds[part]
    ends = np.array([end for _, end in bounds])
    local[:] = 0
    edges_from = np.zeros(job.num_parts, np.int64)
    for _, edges in buckets.read(part):
        src = edges[:, 0]
        edges_from += np.bincount(np.searchsorted(ends, src, side="right"), minlength=job.num_parts)
        local[src] = 1
    local[start:end] = 0
    rows_from = [int(np.count_nonzero(local[slice(*span)])) for span in bounds]
    num_nodes = end - start + sum(rows_from)
    folder = part_folder(job.staging.path, part)
    layout = part_graph_layout(num_nodes, edge_range[1] - edge_range[0])
    layout.write(folder / GRAPH)
    with (folder / GRAPH).open("r+b") as file:
        types: dict[str, type] = {"src": np.int64, "dst": np.int64}
        types |= {f"node/{name}": dtype for name, dtype in NODE_FIELDS.items()}
        types |= {f"edge/{name}": dtype for name, dtype in EDGE_FIELDS.items()}
        rooms = {name: Room(file, layout.offsets[name], np.dtype(dtype)) for name, dtype in types.items()}
        _fill_nodes(job, rooms, part, local)
        _fill_edges(buckets, rooms, part, local, edge_range[0])
    _write_original_edges(job, buckets, part)
    return Origins(edges_from.tolist(), rows_from)


def _fill_nodes(job: WriteJob, rooms: dict[str, Room], part: int, local: Array) -> None:
    """Fill in the fields of nodes, and number them in `local`, in which the halo is marked."""
    start, end = job.numbering.bounds(part)
    ends = job.numbering.ranges[..., 1].reshape(-1)  # by part, then type
    num_types = job.numbering.ranges.shape[1]
    numbered = 0
    for ids in _own_then_halo(local, start, end, job.rows_in_slice(_NODE_BYTES)):
        local[ids] = np.arange(numbered, numbered + len(ids))
        numbered += len(ids)
        place = np.searchsorted(ends, ids, side="right")
        rooms[f"node/{NID}"].append(ids)
        rooms[f"node/{NTYPE}"].append(place % num_types)
        rooms["node/part_id"].append(place // num_types)
        rooms["node/inner_node"].append((ids >= start) & (ids < end))


def _own_then_halo(local: Array, start: int, end: int, rows: int) -> Iterator[Array]:
    """New IDs of a part's own nodes [start, end), and then of those marked outside of it, `rows` at a time."""
    for first in range(start, end, rows):
        yield np.arange(first, min(end, first + rows))
    for low, high in ((0, start), (end, len(local))):
        for first in range(low, high, rows):
            yield first + np.flatnonzero(local[first : min(high, first + rows)])


def _fill_edges(buckets: EdgeBuckets, rooms: dict[str, Room], part: int, local: Array, first_id: int) -> None:
    for number, edges in buckets.read(part):
        rooms["src"].append(local[edges[:, 0]])
        rooms["dst"].append(local[edges[:, 1]])
        rooms[f"edge/{EID}"].append(np.arange(first_id, first_id + len(edges)))
        rooms[f"edge/{ETYPE}"].append(np.full(len(edges), number))
        rooms["edge/inner_edge"].append(np.ones(len(edges)))
        first_id += len(edges)


def _write_original_edges(job: WriteJob, buckets: EdgeBuckets, part: int) -> None:
    names = [":".join(etype) for etype in job.etypes]
    forms = {name: Form(_INT64, (int(buckets.counts[part, i]),)) for i, name in enumerate(names)}
    layout = tensor_file_layout(forms)
    path = part_folder(job.staging.path, part) / ORIGINAL_EDGES
    layout.write(path)
    with path.open("r+b") as file:
        rooms = [Room(file, layout.offsets[name], _INT64) for name in names]
        for number, edges in buckets.read(part):
            rooms[number].append(edges[:, 2])
