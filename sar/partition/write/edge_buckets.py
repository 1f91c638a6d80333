"""Edges by part and type, in scratch files: the one pass over the edges.

In a part, edges come by type and then by original ID, which is the order in which they are read: nothing is sorted
beyond a chunk.
"""

import contextlib
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from sar.common_tuples import CanonicalEtype
from sar.errors import PartitionError
from sar.partition.graph_data import Array
from sar.partition.write.numbering import by_part
from sar.partition.write.write_job import WriteJob, stored_spec

_EDGE_BYTES = 120  # with all copies, and what arrives from other processes
COPIES = 4
"""Of the rows of a field that are in memory at once: as read, in their new order, on their way, as they arrive."""


class EdgeBuckets:
    """The edges into each of this process's parts, one type after the other, (n, 3) each: new source, new destination,
    original ID within the type.

    counts: edges by part and type, (P, R), of all processes.
    """

    def __init__(self, job: WriteJob) -> None:
        self._job = job
        self.counts = np.zeros((job.num_parts, len(job.etypes)), np.int64)
        for number, etype in enumerate(job.etypes):
            step = partial(self._divide, number, etype)
            self.counts[job.own_parts, number] = job.staging.step(f"edges of {etype}", step)
        self.counts = job.staging.team.sum(self.counts)

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
            for start, end in self._job.staging.team.shares(self._job.graph.edges[etype].num_edges, self.rows(etype)):
                yield np.fromfile(file, self._job.numbering.part_of.dtype, end - start)

    def rows(self, etype: CanonicalEtype) -> int:
        """Edges in a chunk, which are also the rows of its fields that are read at once."""
        fields = self._job.graph.edge_data.get(etype, {})
        widest = max((stored_spec(key, column).row_bytes for key, column in fields.items()), default=0)
        return self._job.rows_in_slice(_EDGE_BYTES + COPIES * widest)

    def _divide(self, number: int, etype: CanonicalEtype) -> list[int]:
        """Put the edges of a type into their files; return how many each of this process's parts has."""
        job, team = self._job, self._job.staging.team
        edges, name = job.graph.edges[etype], ":".join(etype)
        source, destination = job.nodes_of(etype[0]), job.nodes_of(etype[2])
        counts = dict.fromkeys(job.own_parts, 0)
        with contextlib.ExitStack() as stack:
            files = {part: stack.enter_context(self._file(number, part).open("wb")) for part in job.own_parts}
            parts_file = stack.enter_context(self._parts_file(number).open("wb"))
            for start, src, dst in team.edges(edges, self.rows(etype)):
                job.progress(f"dividing {name}", start / edges.num_edges)
                _check_ends(name, "source", start, src, source)
                _check_ends(name, "destination", start, dst, destination)
                parts = job.numbering.part_of[destination][dst]
                order, sizes = by_part(parts, job.num_parts)
                rows = np.empty((len(src), 3), job.id_type)
                rows[:, 0] = job.numbering.new_id[source][src]
                rows[:, 1] = job.numbering.new_id[destination][dst]
                rows[:, 2] = np.arange(start, start + len(src))
                if job.graph.edge_data.get(etype):
                    parts_file.write(parts.data)
                for part, arrived in team.deliver(rows[order], sizes):
                    files[part].write(arrived.data)
                    counts[part] += len(arrived)
        total = int(team.sum(np.array([sum(counts.values())]))[0])
        if total != edges.num_edges:
            raise PartitionError(
                f"{total} edges {name} were read; expected {edges.num_edges}. The input has changed since it was "
                "opened: start again."
            )
        return list(counts.values())

    def _file(self, number: int, part: int) -> Path:
        return self._job.staging.scratch / f"edges-{number}-{part}"

    def _parts_file(self, number: int) -> Path:
        return self._job.staging.scratch / f"parts-{number}-{self._job.staging.team.rank}"


def _check_ends(name: str, end: str, start: int, ids: Array, nodes: slice) -> None:
    count = nodes.stop - nodes.start
    if ids.size and not 0 <= ids.min() <= ids.max() < count:
        edge = int(np.flatnonzero((ids < 0) | (ids >= count))[0])
        raise PartitionError(
            f"edge {start + edge} of {name} has the {end} {ids[edge]}; expected a node from 0 to {count - 1}. "
            "Correct the edges, or name the number of nodes."
        )
