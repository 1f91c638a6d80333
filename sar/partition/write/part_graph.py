"""The structure of one part, in DGL's numbers: its own nodes first, then the halo, both in the order of new IDs.

[Note: halo of several hops]
sar only needs the edges into a part's own nodes, and DGL's pipeline only writes these. `partition_graph` with a halo of
H hops also keeps the edges into nodes up to H - 1 hops away, against the direction of the edges, and all edges out of
own nodes, for samplers and `out_degrees`. They are found in the scratch files of the other parts, in H passes over
these for each part, in slices.
"""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

import numpy as np

from sar.common_tuples import EID, ETYPE, NID, NTYPE
from sar.data.arrays import Array
from sar.data.graph_files import graph_file_layout
from sar.data.part_files import EDGE_FIELDS, INNER_EDGE, INNER_NODE, NODE_FIELDS, PART_ID
from sar.data.partition_json import GRAPH, ORIGINAL_EDGES, part_folder
from sar.data.tensor_files import ArraySpec, FileLayout, tensor_file_layout
from sar.partition.write.divide import EdgeBuckets
from sar.partition.write.write_job import WriteJob
from sar.tensors.id_arrays import pieces

_NODE_BYTES = 64  # with all fields and copies


def write_part_graph(job: WriteJob, buckets: EdgeBuckets, part: int, local: Array) -> tuple[Array, list[int]]:
    """Write a part's nodes, the edges into them, outer edges, the halo, and original edge IDs.

    `local` is a work array of (N,) integers, which is overwritten: the number inside the part of every new ID. Returns,
    by the part of the source, the numbers of edges of each type and of their distinct sources, (2, R, P), and of
    the distinct sources of all types, (P,). There are 0 sources for the part itself.
    """
    spans = [job.numbering.bounds(other) for other in range(job.num_parts)]
    start, end = spans[part]
    ends = np.array([last for _, last in spans])
    edges_from, rows_from = counts = np.zeros((2, len(job.etypes), job.num_parts), np.int64)
    local[:] = 0  # set below at the nodes of other parts that this part reads
    for number, of_type in groupby(buckets.read(part), key=lambda numbered: numbered[0]):
        for _, edges in of_type:
            owners = np.searchsorted(ends, edges[:, 0], side="right")
            edges_from[number] += np.bincount(owners, minlength=job.num_parts)
            local[edges[:, 0]] = number + 1
        local[start:end] = 0
        rows_from[number] = [np.count_nonzero(local[slice(*span)] == number + 1) for span in spans]
    np.minimum(local, 1, out=local)
    rows_of_all = [int(np.count_nonzero(local[slice(*span)])) for span in spans]

    outer_file = job.directory.scratch / f"outer-{part}"
    num_outer = 0 if job.num_hops is None else _find_outer_edges(job, buckets, part, local, job.num_hops, outer_file)
    halo = np.count_nonzero(local[:start]) + np.count_nonzero(local[end:])
    num_inner = buckets.counts[part].tolist()
    layout = graph_file_layout(end - start + halo, sum(num_inner) + num_outer, NODE_FIELDS, EDGE_FIELDS)
    names = [":".join(etype) for etype in job.etypes]
    specs = {name: ArraySpec(np.dtype("<i8"), (count,)) for name, count in zip(names, num_inner, strict=True)}
    original_layout = tensor_file_layout(specs)
    folder = part_folder(job.directory.path, part)
    layout.create(folder / GRAPH)
    original_layout.create(folder / ORIGINAL_EDGES)
    with (folder / GRAPH).open("r+b") as file, (folder / ORIGINAL_EDGES).open("r+b") as original_file:
        _fill_nodes(job, file, layout, part, local)
        fields = "src", "dst", f"edge/{EID}", f"edge/{ETYPE}", f"edge/{INNER_EDGE}"
        writers = [layout.writer(file, name) for name in fields]

        def append(edges: Array, *others: Array) -> None:  # new sources, new destinations, ...; and further fields
            for writer, column in zip(writers, (local[edges[:, 0]], local[edges[:, 1]], *others), strict=True):
                writer.append(column)

        original_ids = [original_layout.writer(original_file, name) for name in names]
        first_id = int(buckets.ranges[part, 0, 0])
        for number, edges in buckets.read(part):
            append(edges, first_id + np.arange(len(edges)), np.full(len(edges), number), np.ones(len(edges)))
            original_ids[number].append(edges[:, 2])
            first_id += len(edges)
        if num_outer:
            with outer_file.open("rb") as outer:
                while len(found := np.fromfile(outer, np.int64, 4 * buckets.rows_read)):
                    edges = found.reshape(-1, 4)
                    append(edges, edges[:, 2], edges[:, 3], np.zeros(len(edges)))
    outer_file.unlink(missing_ok=True)
    return counts, rows_of_all


def _find_outer_edges(job: WriteJob, buckets: EdgeBuckets, part: int, local: Array, hops: int, outer_file: Path) -> int:
    """Write the edges of other parts that a part keeps, and return their number: see [Note: halo of several hops].

    Rows are int64 in the order of new IDs: new source, new destination, new edge ID, type. `local`, (N,)
    by new ID, is 1 at sources of edges into the part, and afterwards positive in the whole halo.
    """
    start, end = job.numbering.bounds(part)
    led_to = hops + 1  # marks nodes that only edges out of the part reach; their in-edges are not kept
    own = local[start:end] = hops + 2

    def edges_of_others() -> Iterator[tuple[Array, int, int]]:  # edges, their type, the new ID of the first
        for other in range(job.num_parts):
            first_id = int(buckets.ranges[other, 0, 0])
            for number, edges in buckets.read(other) if other != part else ():
                yield edges, number, first_id
                first_id += len(edges)

    for hop in range(1, hops):
        for edges, _, _ in edges_of_others():
            src = edges[local[edges[:, 1]] == hop, 0]
            local[src[local[src] == 0]] = hop + 1
    count = 0
    with outer_file.open("wb") as file:
        for edges, number, first_id in edges_of_others():
            src, dst = edges[:, 0], edges[:, 1]
            goes_out = local[src] == own
            kept = np.flatnonzero(goes_out | ((local[dst] > 0) & (local[dst] < hops)))
            ends = dst[goes_out]
            local[ends[local[ends] == 0]] = led_to
            rows = np.stack([src[kept], dst[kept], kept + first_id, np.full(len(kept), number)], axis=1)
            file.write(rows.astype(np.int64, copy=False).data)
            count += len(kept)
    return count


def _fill_nodes(job: WriteJob, file: BinaryIO, layout: FileLayout, part: int, local: Array) -> None:
    """Fill in the fields of nodes, and number them in `local`, where the halo is marked."""
    new_ids, types, owners, inner = (layout.writer(file, f"node/{name}") for name in (NID, NTYPE, PART_ID, INNER_NODE))
    start, end = job.numbering.bounds(part)
    ends = job.numbering.ranges[..., 1].reshape(-1)  # by part, then type
    num_types = job.numbering.ranges.shape[1]
    numbered = 0
    for low, high, is_own in ((start, end, True), (0, start, False), (end, len(local), False)):
        for rows in pieces(high - low, job.rows_in_slice(_NODE_BYTES)):
            ids = low + np.arange(rows.start, rows.stop)
            if not is_own:
                ids = ids[local[ids] > 0]
            local[ids] = np.arange(numbered, numbered + len(ids))
            numbered += len(ids)
            part_and_type = np.searchsorted(ends, ids, side="right")
            new_ids.append(ids)
            types.append(part_and_type % num_types)
            owners.append(part_and_type // num_types)
            inner.append(np.full(len(ids), is_own))
