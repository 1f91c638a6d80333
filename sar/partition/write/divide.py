"""The two passes over the input: edges go to scratch files by part and type, and fields to the files of the parts.

In a part, edges are in order of type and then original ID, which is the order of reading, so sorting is limited to
chunks. A field is read once in order; for an edge field, the ends of its edges are read again. The rows of a slice are
appended to the files of their parts. So all files are read and written sequentially.

[Note: rows in order] If nodes are not in order of their original IDs, the rows of a part are divided further, into runs
of new IDs that fit in memory. When all rows are in their runs, each run is read, put in order, and written again.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from sar.common_tuples import CanonicalEtype
from sar.data.arrays import Array
from sar.data.partition_json import EDGE_FEATURES, NODE_FEATURES, ORIGINAL_NODES, part_folder
from sar.data.tensor_files import ArraySpec, FileLayout, tensor_file_layout
from sar.partition.graph_source import Column, EdgeSource
from sar.partition.write.write_job import WriteJob, by_part, stored_spec
from sar.tensors.id_arrays import pieces

_EDGE_BYTES = 120  # per edge, with all copies
_ORDER_BYTES = 32  # per row of a slice, in addition to the row
COPIES = 4
"""Copies of a field's rows in memory: as read, as numpy's type, in their new order, as written."""


class EdgeBuckets:
    """The edges into each part in scratch files, one for each part and type, as rows (n, 3): new source, new
    destination, original ID within the type.
    """

    def __init__(self, job: WriteJob) -> None:
        self._job = job
        self.rows_read = job.rows_in_slice(_EDGE_BYTES)  # edges that are read at a time
        self.counts = np.zeros((job.num_parts, len(job.etypes)), np.int64)  # by part and type
        for number, etype in enumerate(job.etypes):
            self._divide(number, etype)
        ends = self.counts.cumsum().reshape(self.counts.shape)
        self.ranges = np.stack([ends - self.counts, ends], axis=2)  # [start, end) of new edge IDs, (P, R, 2)

    def read(self, part: int) -> Iterator[tuple[int, Array]]:
        """Read the edges into a part in order: yields the type, and some of its edges."""
        for number in range(len(self._job.etypes)):
            with self._file(number, part).open("rb") as file:
                while len(found := np.fromfile(file, self._job.id_type, 3 * self.rows_read)):
                    yield number, found.reshape(-1, 3)

    def _divide(self, number: int, etype: CanonicalEtype) -> None:
        """Write the edges of a type to their files."""
        job, edges, name = self._job, self._job.graph.edges[etype], ":".join(etype)
        source, destination = job.graph.nodes_of(etype[0]), job.graph.nodes_of(etype[2])
        with ExitStack() as stack:
            files = [stack.enter_context(self._file(number, part).open("wb")) for part in range(job.num_parts)]
            for chunk in pieces(edges.num_edges, self.rows_read):
                src, dst = edges.read(chunk.start, chunk.stop)
                job.progress(f"dividing {name}", chunk.start / edges.num_edges)
                order, sizes = by_part(job.numbering.part_of[destination][dst], job.num_parts)
                rows = np.empty((len(src), 3), job.id_type)
                rows[:, 0] = job.numbering.new_id[source][src]
                rows[:, 1] = job.numbering.new_id[destination][dst]
                rows[:, 2] = np.arange(chunk.start, chunk.stop)
                for file, of_part in zip(files, np.split(rows[order], sizes.cumsum()[:-1]), strict=True):
                    file.write(of_part.data)
                self.counts[:, number] += sizes

    def _file(self, number: int, part: int) -> Path:
        return self._job.directory.scratch / f"edges-{number}-{part}"


class _Field(NamedTuple):
    """A field of a type: its name in the parts' files, and the type's ID."""

    name: str
    type_id: int
    column: Column
    ntype: str  # of the nodes, or of the destinations of the edges
    edges: EdgeSource | None = None  # for fields of edges

    @property
    def spec(self) -> ArraySpec:
        return stored_spec(self.name, self.column)


class _Numbers(NamedTuple):
    """A column of 0, 1, 2, ..."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any] = np.dtype(np.int64)

    def __getitem__(self, rows: slice, /) -> Array:  # type: ignore[override]
        return np.arange(rows.start, rows.stop)


def write_node_fields(job: WriteJob) -> None:
    """Write the parts' files of node fields and of original node IDs."""
    fields, ids = [], []
    for type_id, ntype in enumerate(job.ntypes):
        for key, column in job.graph.node_data.get(ntype, {}).items():
            fields.append(_Field(f"{ntype}/{key}", type_id, column, ntype))
        ids.append(_Field(ntype, type_id, _Numbers((job.graph.num_nodes[ntype],)), ntype))
    counts = job.numbering.ranges[..., 1] - job.numbering.ranges[..., 0]
    _write_fields(job, NODE_FEATURES, fields, counts, _ORDER_BYTES)
    _write_fields(job, ORIGINAL_NODES, ids, counts, _ORDER_BYTES)


def write_edge_fields(job: WriteJob, buckets: EdgeBuckets) -> None:
    """Write the parts' files of edge fields."""
    fields = []
    for type_id, etype in enumerate(job.etypes):
        for key, column in job.graph.edge_data.get(etype, {}).items():
            fields.append(_Field(f"{':'.join(etype)}/{key}", type_id, column, etype[2], job.graph.edges[etype]))
    _write_fields(job, EDGE_FEATURES, fields, buckets.counts, _EDGE_BYTES)


def _write_fields(job: WriteJob, name: str, fields: Sequence[_Field], counts: Array, work_bytes: int) -> None:
    """Write a file of the same name in each part.

    `counts` are the rows by part and type, (P, T); `work_bytes` is the memory per row in addition to its values.
    """
    paths = [part_folder(job.directory.path, part) / name for part in range(job.num_parts)]
    layouts = []
    for path, sizes in zip(paths, counts.tolist(), strict=True):
        specs = {one.name: ArraySpec(one.spec.dtype, (sizes[one.type_id], *one.spec.shape[1:])) for one in fields}
        layouts.append(tensor_file_layout(specs))
        path.parent.mkdir(exist_ok=True)
        layouts[-1].create(path)
    for field in fields:
        if field.spec.row_bytes:
            with ExitStack() as stack:
                files = [stack.enter_context(path.open("r+b")) for path in paths]
                _write_field(job, field, files, layouts, work_bytes)


def _write_field(
    job: WriteJob, field: _Field, files: Sequence[BinaryIO], layouts: Sequence[FileLayout], work_bytes: int
) -> None:
    """Write a field to the files of the parts: see [Note: rows in order]."""
    spec, numbering = field.spec, job.numbering
    at_once = job.rows_in_slice(COPIES * spec.row_bytes + work_bytes)
    old_id = numbering.old_id if field.edges is None else None
    run = max(1, len(numbering.new_id)) if old_id is None else at_once
    ranges = numbering.ranges[:, job.ntypes.index(field.ntype)].tolist()
    runs = [
        (part, low, at, min(at + run, high)) for part, (low, high) in enumerate(ranges) for at in range(low, high, run)
    ]
    writers = [layouts[part].writer(files[part], field.name, (at - low) * spec.row_bytes) for part, low, at, _ in runs]
    starts, new_id = np.array([at for _, _, at, _ in runs]), numbering.new_id[job.graph.nodes_of(field.ntype)]
    for rows in pieces(spec.shape[0], at_once):
        job.progress(f"dividing {field.name}", rows.start / spec.shape[0])
        nodes = rows if field.edges is None else field.edges.read(rows.start, rows.stop)[1]
        run_of = np.searchsorted(starts, new_id[nodes], side="right") - 1
        order, sizes = by_part(run_of.astype(np.min_scalar_type(len(runs))), len(runs))
        values = np.asarray(field.column[rows])[order].astype(spec.dtype, copy=False)
        for writer, of_run in zip(writers, np.split(values, sizes.cumsum()[:-1]), strict=True):
            writer.append(of_run)
    if old_id is not None:
        for writer, (_, _, at, end) in zip(writers, runs, strict=True):
            job.progress(f"ordering {field.name}", at / len(new_id))
            writer.rearrange(old_id[at:end].argsort(), spec.shape[1:])  # they were written by original ID
