"""The two passes over the input: edges into scratch files by part and type, and fields into the files of the parts.

In a part, edges come by type and then by original ID, which is the order in which they are read: nothing is sorted
beyond a chunk. A field is read once, from its first row to its last; the rows of a slice go to their parts' files,
behind those of earlier slices. So all files are read and written from front to back.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sar.common_tuples import CanonicalEtype
from sar.data.arrays import Array
from sar.data.partition_json import EDGE_FEATURES, NODE_FEATURES, ORIGINAL_NODES, part_folder
from sar.data.tensor_files import ArraySpec, FileLayout, tensor_file_layout
from sar.errors import PartitionError
from sar.partition.graph_source import Column, first_outside
from sar.partition.write.write_job import WriteJob, by_part, stored_spec

_EDGE_BYTES = 120  # with all copies, and what arrives from other processes
_ORDER_BYTES = 32  # for each row of a slice, beside the row
COPIES = 4
"""Of the rows of a field that are in memory at once: as read, in their new order, on their way, as they arrive."""


class EdgeBuckets:
    """The edges into each of this process's parts, one type after the other, (n, 3) each: new source, new destination,
    original ID within the type.
    """

    def __init__(self, job: WriteJob) -> None:
        self._job = job
        self.counts = np.zeros((job.num_parts, len(job.etypes)), np.int64)  # by part and type, of all processes
        for number, etype in enumerate(job.etypes):
            step = partial(self._divide, number, etype)
            self.counts[job.own_parts, number] = job.staging.step(f"edges of {etype}", step)
        self.counts = job.staging.writers.sum(self.counts)

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
        """The part of each edge of a type that has fields, in this process's chunks of `rows`."""
        etype = self._job.etypes[number]
        with self._parts_file(number).open("rb") as file:
            num_edges = self._job.graph.edges[etype].num_edges
            for start, end in self._job.staging.writers.shares(num_edges, self.rows(etype)):
                yield np.fromfile(file, self._job.numbering.part_of.dtype, end - start)

    def rows(self, etype: CanonicalEtype) -> int:
        """Edges in a chunk, which are also the rows of its fields that are read at once."""
        fields = self._job.graph.edge_data.get(etype, {})
        widest = max((stored_spec(key, column).row_bytes for key, column in fields.items()), default=0)
        return self._job.rows_in_slice(_EDGE_BYTES + COPIES * widest)

    def _divide(self, number: int, etype: CanonicalEtype) -> list[int]:
        """Put the edges of a type into their files; how many each of this process's parts has."""
        job, writers = self._job, self._job.staging.writers
        edges, name = job.graph.edges[etype], ":".join(etype)
        source, destination = job.graph.nodes_of(etype[0]), job.graph.nodes_of(etype[2])
        counts = dict.fromkeys(job.own_parts, 0)
        with contextlib.ExitStack() as stack:
            files = {part: stack.enter_context(self._file(number, part).open("wb")) for part in job.own_parts}
            parts_file = stack.enter_context(self._parts_file(number).open("wb"))
            for start, end in writers.shares(edges.num_edges, self.rows(etype)):
                src, dst = edges.read(start, end)
                job.progress(f"dividing {name}", start / edges.num_edges)
                for which, ids, nodes in (("source", src, source), ("destination", dst, destination)):
                    if (edge := first_outside(ids, nodes.stop - nodes.start)) is not None:
                        raise PartitionError(
                            f"edge {start + edge} of {name} has the {which} {ids[edge]}; expected a node from 0 to "
                            f"{nodes.stop - nodes.start - 1}. Correct the edges, or name the number of nodes."
                        )
                parts = job.numbering.part_of[destination][dst]
                order, sizes = by_part(parts, job.num_parts)
                rows = np.empty((len(src), 3), job.id_type)
                rows[:, 0] = job.numbering.new_id[source][src]
                rows[:, 1] = job.numbering.new_id[destination][dst]
                rows[:, 2] = np.arange(start, start + len(src))
                if job.graph.edge_data.get(etype):
                    parts_file.write(parts.data)
                for part, arrived in writers.deliver(rows[order], sizes):
                    files[part].write(arrived.data)
                    counts[part] += len(arrived)
        return list(counts.values())

    def _file(self, number: int, part: int) -> Path:
        return self._job.staging.scratch / f"edges-{number}-{part}"

    def _parts_file(self, number: int) -> Path:
        return self._job.staging.scratch / f"parts-{number}-{self._job.staging.writers.rank}"


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


class _PartFiles:
    """A file of the same name in each of this process's parts; `counts` are the rows by part and type, (P, T)."""

    def __init__(self, job: WriteJob, name: str, fields: Sequence[_Field], counts: Array) -> None:
        self._job, self._name = job, name
        self._layouts: dict[int, FileLayout] = {}
        for part in job.own_parts:
            rows = ((field, int(counts[part, field.type_id])) for field in fields)
            specs = {field.name: ArraySpec(field.spec.dtype, (n, *field.spec.shape[1:])) for field, n in rows}
            self._layouts[part] = tensor_file_layout(specs)
        job.staging.step(f"{name} laid out", self._create)

    def _create(self) -> None:
        for part, layout in self._layouts.items():
            folder = part_folder(self._job.staging.path, part)
            folder.mkdir(exist_ok=True)
            layout.create(folder / self._name)

    def fill(self, field: _Field, rows: int, parts: Iterator[Array]) -> None:
        """Fill in a field, slices of `rows` at a time; `parts` has the part of every row of each slice."""
        self._job.staging.step(f"{self._name} {field.name}", partial(self._divide, field, rows, parts))

    def _divide(self, field: _Field, rows: int, parts: Iterator[Array]) -> None:
        job, spec = self._job, field.spec
        if not spec.row_bytes:
            return
        with contextlib.ExitStack() as stack:
            files = {}
            for part, layout in self._layouts.items():
                file = stack.enter_context((part_folder(job.staging.path, part) / self._name).open("r+b"))
                files[part] = layout.writer(file, field.name)
            for start, end in job.staging.writers.shares(spec.shape[0], rows):
                job.progress(f"dividing {field.name}", start / spec.shape[0])
                order, sizes = by_part(next(parts), job.num_parts)
                values = np.asarray(field.column[start:end])[order].astype(spec.dtype, copy=False)
                for part, arrived in job.staging.writers.deliver(values, sizes):
                    files[part].append(arrived)


def write_node_fields(job: WriteJob) -> None:
    """Write the parts' files of node fields and of original node IDs."""
    columns, ids = [], []
    for type_id, ntype in enumerate(job.ntypes):
        fields = job.graph.node_data.get(ntype, {})
        columns += [_Field(f"{ntype}/{key}", type_id, column) for key, column in fields.items()]
        ids.append(_Field(ntype, type_id, _Numbers((job.graph.num_nodes[ntype],))))
    counts = job.numbering.ranges[..., 1] - job.numbering.ranges[..., 0]
    for name, fields_of_file in ((NODE_FEATURES, columns), (ORIGINAL_NODES, ids)):
        files = _PartFiles(job, name, fields_of_file, counts)
        for field in fields_of_file:
            part_of = job.numbering.part_of[job.graph.nodes_of(job.ntypes[field.type_id])]
            rows = job.rows_in_slice(COPIES * field.spec.row_bytes + _ORDER_BYTES)
            slices = job.staging.writers.shares(len(part_of), rows)
            files.fill(field, rows, (part_of[start:end] for start, end in slices))


def write_edge_fields(job: WriteJob, buckets: EdgeBuckets) -> None:
    """Write the parts' files of edge fields."""
    columns = []
    for type_id, etype in enumerate(job.etypes):
        fields = job.graph.edge_data.get(etype, {})
        columns += [_Field(f"{':'.join(etype)}/{key}", type_id, column) for key, column in fields.items()]
    files = _PartFiles(job, EDGE_FEATURES, columns, buckets.counts)
    for field in columns:
        files.fill(field, buckets.rows(job.etypes[field.type_id]), buckets.parts(field.type_id))
