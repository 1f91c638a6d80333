"""Edges of other parts that `dgl.distributed.partition_graph` keeps with a part, beside those into its own nodes.

[Note: halo of several hops]
sar needs the edges into a part's own nodes, and DGL's pipeline writes no others. `partition_graph` with a halo of H
hops also keeps the edges into nodes up to H - 1 hops away, against the direction of the edges, and all edges out of own
nodes, so that samplers and `out_degrees` find them in the part. They are found in the scratch files of the other parts:
H passes over these for each part, in slices.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sar.partition.graph_data import Array
from sar.partition.write.edge_buckets import EdgeBuckets
from sar.partition.write.write_job import WriteJob


class OuterEdges:
    """The edges that a part keeps of others; none where the job has no number of hops.

    count: how many, after `find`.
    """

    def __init__(self, job: WriteJob, buckets: EdgeBuckets, part: int) -> None:
        self.count = 0
        self._job, self._buckets, self._part = job, buckets, part

    def find(self, local: Array) -> None:
        """Find them, and mark the nodes at their ends.

        Args:
            local: (N,) by new ID: 1 at sources of edges into the part, else 0; becomes more than 0 in all of the halo.
        """
        hops = self._job.num_hops
        if hops is None:
            return
        start, end = self._job.numbering.bounds(self._part)
        led_to = hops + 1  # a mark of nodes that only edges out of the part reach, whose in-edges are not kept
        own = local[start:end] = hops + 2
        for hop in range(1, hops):
            for edges, _, _ in self._of_others():
                src = edges[local[edges[:, 1]] == hop, 0]
                local[src[local[src] == 0]] = hop + 1
        with self._file.open("wb") as file:
            for edges, number, first_id in self._of_others():
                src, dst = edges[:, 0], edges[:, 1]
                goes_out = local[src] == own
                kept = np.flatnonzero(goes_out | ((local[dst] > 0) & (local[dst] < hops)))
                ends = dst[goes_out]
                local[ends[local[ends] == 0]] = led_to
                rows = np.stack([src[kept], dst[kept], kept + first_id, np.full(len(kept), number)], axis=1)
                file.write(rows.astype(np.int64, copy=False).data)
                self.count += len(kept)

    def read(self) -> Iterator[Array]:
        """They, in the order of their new IDs, (n, 4) each: new source, new destination, new edge ID, type."""
        if self.count:
            with self._file.open("rb") as file:
                while len(found := np.fromfile(file, np.int64, 4 * self._buckets.rows_read)):
                    yield found.reshape(-1, 4)

    def remove(self) -> None:
        """Remove the file that they are in."""
        self._file.unlink(missing_ok=True)

    @property
    def _file(self) -> Path:
        return self._job.staging.scratch / f"outer-{self._part}"

    def _of_others(self) -> Iterator[tuple[Array, int, int]]:
        """Edges into other parts, in the order of their new IDs: some of a type, the type, the first one's new ID."""
        for part in range(self._job.num_parts):
            first_id = int(self._buckets.ranges[part, 0, 0])
            for number, edges in self._buckets.read(part) if part != self._part else ():
                yield edges, number, first_id
                first_id += len(edges)
