"""Fields divided among the files of the parts.

A field is read once, from its first row to its last; the rows of a slice go to their parts' files, behind those of
earlier slices. So all files are read and written from front to back.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sar.adapters.dgl.writer.binary_layout import Form, Layout, Room, tensor_file_layout
from sar.adapters.dgl.writer.partition_writer import EDGE_FEATURES, NODE_FEATURES, ORIGINAL_NODES, part_folder
from sar.partition.graph_data import Array
from sar.partition.graph_source import Column
from sar.partition.write.edge_buckets import COPIES, EdgeBuckets
from sar.partition.write.numbering import by_part
from sar.partition.write.write_job import WriteJob, column_form

_ORDER_BYTES = 32  # for each row of a slice, beside the row


class _Field(NamedTuple):
    """A field of a type: its name in the parts' files, and the type's ID."""

    name: str
    kind: int
    column: Column


class _Numbers(NamedTuple):
    """A column of 0, 1, 2, ..."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any] = np.dtype(np.int64)

    def __getitem__(self, rows: Any, /) -> Array:  # type: ignore[override]
        return np.arange(rows.start, rows.stop)


def write_node_fields(job: WriteJob) -> None:
    """Write the parts' files of node fields and of original node IDs."""
    columns, ids = [], []
    for kind, ntype in enumerate(job.ntypes):
        fields = job.graph.node_data.get(ntype, {})
        columns += [_Field(f"{ntype}/{key}", kind, column) for key, column in fields.items()]
        ids.append(_Field(ntype, kind, _Numbers((job.graph.num_nodes[ntype],))))
    counts = job.numbering.ranges[..., 1] - job.numbering.ranges[..., 0]
    for file, fields_of_file in ((NODE_FEATURES, columns), (ORIGINAL_NODES, ids)):
        layouts = _lay_out(job, file, fields_of_file, counts)
        for field in fields_of_file:
            part_of = job.numbering.part_of[job.nodes_of(job.ntypes[field.kind])]
            rows = job.rows_in_slice(COPIES * column_form(field.name, field.column).row_bytes + _ORDER_BYTES)
            parts = (part_of[start:end] for start, end in job.staging.team.shares(len(part_of), rows))
            step = partial(_divide, job, file, field, layouts, rows, parts)
            job.staging.step(f"{file} {field.name}", step)


def write_edge_fields(job: WriteJob, buckets: EdgeBuckets) -> None:
    """Write the parts' files of edge fields."""
    columns = []
    for kind, etype in enumerate(job.etypes):
        fields = job.graph.edge_data.get(etype, {})
        columns += [_Field(f"{':'.join(etype)}/{key}", kind, column) for key, column in fields.items()]
    layouts = _lay_out(job, EDGE_FEATURES, columns, buckets.counts)
    for field in columns:
        rows = buckets.rows(job.etypes[field.kind])
        step = partial(_divide, job, EDGE_FEATURES, field, layouts, rows, buckets.parts(field.kind))
        job.staging.step(f"{EDGE_FEATURES} {field.name}", step)


def _lay_out(job: WriteJob, file: str, fields: Sequence[_Field], counts: Array) -> dict[int, Layout]:
    """Make a file for each of this process's parts with room for fields; `counts` are rows by part and type."""
    layouts = {}
    for part in job.mine:
        forms = {field.name: column_form(field.name, field.column) for field in fields}
        shapes = {field.name: (int(counts[part, field.kind]), *forms[field.name].shape[1:]) for field in fields}
        layouts[part] = tensor_file_layout({name: Form(form.dtype, shapes[name]) for name, form in forms.items()})

    def write() -> None:
        for part, layout in layouts.items():
            folder = part_folder(job.staging.path, part)
            folder.mkdir(exist_ok=True)
            layout.write(folder / file)

    job.staging.step(f"{file} laid out", write)
    return layouts


def _divide(
    job: WriteJob, file: str, field: _Field, layouts: dict[int, Layout], rows: int, parts: Iterator[Array]
) -> None:
    """Fill a field into the files of this process's parts; `parts` has the part of every row, a slice at a time."""
    form = column_form(field.name, field.column)
    if not form.row_bytes:
        return
    with contextlib.ExitStack() as stack:
        rooms = {}
        for part, layout in layouts.items():
            opened = stack.enter_context((part_folder(job.staging.path, part) / file).open("r+b"))
            rooms[part] = Room(opened, layout.offsets[field.name], form.dtype)
        for start, end in job.staging.team.shares(form.shape[0], rows):
            job.progress(f"dividing {field.name}", start / form.shape[0])
            order, sizes = by_part(next(parts), job.num_parts)
            values = np.asarray(field.column[start:end])[order].astype(form.dtype, copy=False)
            for part, arrived in job.staging.team.deliver(values, sizes):
                rooms[part].append(arrived)
