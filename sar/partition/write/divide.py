"""The two passes over the input: edges into scratch files by part and type, and fields into the files of the parts.

In a part, edges come by type and then by original ID, which is the order in which they are read: nothing is sorted
beyond a chunk. A field is read once, from its first row to its last; the rows of a slice go to their parts' files,
behind those of earlier slices. So all files are read and written from front to back.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sar.common_tuples import CanonicalEtype
from sar.data.arrays import Array
from sar.data.partition_json import EDGE_FEATURES, NODE_FEATURES, ORIGINAL_NODES, part_folder
from sar.data.tensor_files import ArraySpec, tensor_file_layout
from sar.id_slices import pieces
from sar.partition.graph_source import Column
from sar.partition.write.write_job import WriteJob, by_part, stored_spec

_EDGE_BYTES = 120  # with all copies
_ORDER_BYTES = 32  # for each row of a slice, beside the row
COPIES = 4
"""Of the rows of a field that are in memory at once: as read, as numpy's type, in their new order, as written."""


class EdgeBuckets:
    """The edges into each part in scratch files, one for each part and type, as rows (n, 3): new source, new
    destination, original ID within the type.
    """

    def __init__(self, job: WriteJob) -> None:
        self._job = job
        self.counts = np.zeros((job.num_parts, len(job.etypes)), np.int64)  # by part and type
        for number, etype in enumerate(job.etypes):
            self._divide(number, etype)

    @cached_property
    def ranges(self) -> Array:
        """[start, end) of new edge IDs by part and type, (P, R, 2)."""
        ends = self.counts.cumsum().reshape(self.counts.shape)
        return np.stack([ends - self.counts, ends], axis=2)

    @cached_property
    def rows_read(self) -> int:
        """Edges that are read at once."""
        return self._job.rows_in_slice(_EDGE_BYTES)

    def read(self, part: int) -> Iterator[tuple[int, Array]]:
        """Edges into a part, in their order: the type, and some of its edges."""
        for number in range(len(self._job.etypes)):
            with self._file(number, part).open("rb") as file:
                while len(found := np.fromfile(file, self._job.id_type, 3 * self.rows_read)):
                    yield number, found.reshape(-1, 3)

    def parts(self, number: int) -> Iterator[Array]:
        """The part of each edge of a type that has fields, in the chunks in which edges were read."""
        etype = self._job.etypes[number]
        with self._parts_file(number).open("rb") as file:
            for rows in pieces(self._job.graph.edges[etype].num_edges, self._rows(etype)):
                yield np.fromfile(file, self._job.numbering.part_of.dtype, rows.stop - rows.start)

    def _rows(self, etype: CanonicalEtype) -> int:
        """Edges in a chunk, which are also the rows of its fields that are read at once."""
        fields = self._job.graph.edge_data.get(etype, {})
        widest = max((stored_spec(key, column).row_bytes for key, column in fields.items()), default=0)
        return self._job.rows_in_slice(_EDGE_BYTES + COPIES * widest)

    def _divide(self, number: int, etype: CanonicalEtype) -> None:
        """Put the edges of a type into their files."""
        job, edges, name = self._job, self._job.graph.edges[etype], ":".join(etype)
        source, destination = job.graph.nodes_of(etype[0]), job.graph.nodes_of(etype[2])
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(self._file(number, part).open("wb")) for part in range(job.num_parts)]
            parts_file = stack.enter_context(self._parts_file(number).open("wb"))
            for chunk in pieces(edges.num_edges, self._rows(etype)):
                src, dst = edges.read(chunk.start, chunk.stop)
                job.progress(f"dividing {name}", chunk.start / edges.num_edges)
                parts = job.numbering.part_of[destination][dst]
                order, sizes = by_part(parts, job.num_parts)
                rows = np.empty((len(src), 3), job.id_type)
                rows[:, 0] = job.numbering.new_id[source][src]
                rows[:, 1] = job.numbering.new_id[destination][dst]
                rows[:, 2] = np.arange(chunk.start, chunk.stop)
                if job.graph.edge_data.get(etype):
                    parts_file.write(parts.data)
                for file, of_part in zip(files, np.split(rows[order], sizes.cumsum()[:-1]), strict=True):
                    file.write(of_part.data)
                self.counts[:, number] += sizes

    def _file(self, number: int, part: int) -> Path:
        return self._job.directory.scratch / f"edges-{number}-{part}"

    def _parts_file(self, number: int) -> Path:
        return self._job.directory.scratch / f"parts-{number}"


class _Field(NamedTuple):
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

    def __getitem__(self, rows: slice, /) -> Array:  # type: ignore[override]
        return np.arange(rows.start, rows.stop)


def write_node_fields(job: WriteJob) -> None:
    """Write the parts' files of node fields and of original node IDs."""
    columns, ids = [], []
    for type_id, ntype in enumerate(job.ntypes):
        fields = job.graph.node_data.get(ntype, {})
        columns += [_Field(f"{ntype}/{key}", type_id, column) for key, column in fields.items()]
        ids.append(_Field(ntype, type_id, _Numbers((job.graph.num_nodes[ntype],))))
    counts = job.numbering.ranges[..., 1] - job.numbering.ranges[..., 0]

    def parts(field: _Field) -> Iterator[Array]:
        part_of = job.numbering.part_of[job.graph.nodes_of(job.ntypes[field.type_id])]
        rows = job.rows_in_slice(COPIES * field.spec.row_bytes + _ORDER_BYTES)
        return (part_of[piece] for piece in pieces(len(part_of), rows))

    _write_fields(job, NODE_FEATURES, columns, counts, parts)
    _write_fields(job, ORIGINAL_NODES, ids, counts, parts)


def write_edge_fields(job: WriteJob, buckets: EdgeBuckets) -> None:
    """Write the parts' files of edge fields."""
    columns = []
    for type_id, etype in enumerate(job.etypes):
        fields = job.graph.edge_data.get(etype, {})
        columns += [_Field(f"{':'.join(etype)}/{key}", type_id, column) for key, column in fields.items()]
    _write_fields(job, EDGE_FEATURES, columns, buckets.counts, lambda field: buckets.parts(field.type_id))


def _write_fields(
    job: WriteJob, name: str, fields: Sequence[_Field], counts: Array, parts: Callable[[_Field], Iterator[Array]]
) -> None:
    """Write a file of the same name in each part.

    `counts` are the rows by part and type, (P, T); `parts` yields the part of each row of a field, slice by slice.
    """
    paths = [part_folder(job.directory.path, part) / name for part in range(job.num_parts)]
    layouts = []
    for path, sizes in zip(paths, counts.tolist(), strict=True):
        specs = {one.name: ArraySpec(one.spec.dtype, (sizes[one.type_id], *one.spec.shape[1:])) for one in fields}
        layouts.append(tensor_file_layout(specs))
        path.parent.mkdir(exist_ok=True)
        layouts[-1].create(path)
    for field in fields:
        if not field.spec.row_bytes:
            continue
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(path.open("r+b")) for path in paths]
            writers = [layout.writer(file, field.name) for layout, file in zip(layouts, files, strict=True)]
            start = 0
            for of_slice in parts(field):
                job.progress(f"dividing {field.name}", start / field.spec.shape[0])
                order, part_sizes = by_part(of_slice, job.num_parts)
                values = np.asarray(field.column[start : start + len(order)])[order].astype(
                    field.spec.dtype, copy=False
                )
                for writer, rows in zip(writers, np.split(values, part_sizes.cumsum()[:-1]), strict=True):
                    writer.append(rows)
                start += len(order)
