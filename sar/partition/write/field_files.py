"""Fields divided among the files of the parts.

A field is read once, from its first row to its last; the rows of a slice go to their parts' files, behind those of
earlier slices. So all files are read and written from front to back.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sar.partition.graph_data import Array
from sar.partition.graph_source import Column
from sar.partition.write.edge_buckets import COPIES, EdgeBuckets
from sar.partition.write.numbering import by_part
from sar.partition.write.write_job import WriteJob, stored_spec
from sar.storage.binary_layout import ArraySpec, FileLayout, tensor_file_layout
from sar.storage.partition_writer import EDGE_FEATURES, NODE_FEATURES, ORIGINAL_NODES, part_folder

_ORDER_BYTES = 32  # for each row of a slice, beside the row


@dataclass(frozen=True)
class _Field:
    """A field of a type: its name in the parts' files, and the type's ID."""

    name: str
    type_id: int
    column: Column

    @property
    def spec(self) -> ArraySpec:
        return stored_spec(self.name, self.column)


class _Numbers(NamedTuple):
    """A column of 0, 1, 2, ..."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any] = np.dtype(np.int64)

    def __getitem__(self, rows: Any, /) -> Array:  # type: ignore[override]
        return np.arange(rows.start, rows.stop)


@dataclass(frozen=True)
class _PartFiles:
    """A file of the same name in each of this process's parts."""

    job: WriteJob
    name: str
    layouts: dict[int, FileLayout]

    @classmethod
    def create(cls, job: WriteJob, name: str, fields: Sequence[_Field], counts: Array) -> "_PartFiles":
        """Make the files with space for fields; `counts` are rows by part and type, (P, T)."""
        layouts = {}
        for part in job.own_parts:
            specs = {}
            for field in fields:
                rows = int(counts[part, field.type_id])
                specs[field.name] = ArraySpec(field.spec.dtype, (rows, *field.spec.shape[1:]))
            layouts[part] = tensor_file_layout(specs)

        def write() -> None:
            for part, layout in layouts.items():
                folder = part_folder(job.staging.path, part)
                folder.mkdir(exist_ok=True)
                layout.create(folder / name)

        job.staging.step(f"{name} laid out", write)
        return cls(job, name, layouts)

    def fill(self, field: _Field, rows: int, parts: Iterator[Array]) -> None:
        """Fill in a field, slices of `rows` at a time; `parts` has the part of every row of each slice."""
        self.job.staging.step(f"{self.name} {field.name}", partial(self._divide, field, rows, parts))

    def _divide(self, field: _Field, rows: int, parts: Iterator[Array]) -> None:
        job, spec = self.job, field.spec
        if not spec.row_bytes:
            return
        with contextlib.ExitStack() as stack:
            writers = {}
            for part, layout in self.layouts.items():
                file = stack.enter_context((part_folder(job.staging.path, part) / self.name).open("r+b"))
                writers[part] = layout.writer(file, field.name)
            for start, end in job.staging.team.shares(spec.shape[0], rows):
                job.progress(f"dividing {field.name}", start / spec.shape[0])
                order, sizes = by_part(next(parts), job.num_parts)
                values = np.asarray(field.column[start:end])[order].astype(spec.dtype, copy=False)
                for part, arrived in job.staging.team.deliver(values, sizes):
                    writers[part].append(arrived)


def write_node_fields(job: WriteJob) -> None:
    """Write the parts' files of node fields and of original node IDs."""
    columns, ids = [], []
    for type_id, ntype in enumerate(job.ntypes):
        fields = job.graph.node_data.get(ntype, {})
        columns += [_Field(f"{ntype}/{key}", type_id, column) for key, column in fields.items()]
        ids.append(_Field(ntype, type_id, _Numbers((job.graph.num_nodes[ntype],))))
    counts = job.numbering.ranges[..., 1] - job.numbering.ranges[..., 0]
    for name, fields_of_file in ((NODE_FEATURES, columns), (ORIGINAL_NODES, ids)):
        files = _PartFiles.create(job, name, fields_of_file, counts)
        for field in fields_of_file:
            part_of = job.numbering.part_of[job.nodes_of(job.ntypes[field.type_id])]
            rows = job.rows_in_slice(COPIES * field.spec.row_bytes + _ORDER_BYTES)
            slices = job.staging.team.shares(len(part_of), rows)
            files.fill(field, rows, (part_of[start:end] for start, end in slices))


def write_edge_fields(job: WriteJob, buckets: EdgeBuckets) -> None:
    """Write the parts' files of edge fields."""
    columns = []
    for type_id, etype in enumerate(job.etypes):
        fields = job.graph.edge_data.get(etype, {})
        columns += [_Field(f"{':'.join(etype)}/{key}", type_id, column) for key, column in fields.items()]
    files = _PartFiles.create(job, EDGE_FEATURES, columns, buckets.counts)
    for field in columns:
        files.fill(field, buckets.rows(job.etypes[field.type_id]), buckets.parts(field.type_id))
