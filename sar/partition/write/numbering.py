"""New node IDs: partition after partition, inside these by type, inside these by original ID."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sar.errors import ConfigError
from sar.partition.graph_data import Array
from sar.partition.graph_source import GraphSource, index_dtype

_ROWS = 1 << 14


@dataclass(frozen=True)
class NodeNumbering:
    """The part and the new ID of every node, where nodes are numbered type after type, as in the `GraphSource`.

    part_of: (N,), of the smallest integer type that holds P - 1.
    new_id: (N,), int32 where that is enough.
    ranges: [start, end) of new IDs by part and type, (P, T, 2); types in their order in the graph.
    """

    part_of: Array
    new_id: Array
    ranges: Array

    @classmethod
    def of(cls, graph: GraphSource, part_of: Array, num_parts: int) -> "NodeNumbering":
        """Number the nodes of a graph.

        Args:
            graph: N nodes.
            part_of: (N,) integers from 0 to P - 1.
            num_parts: P.

        Raises:
            ConfigError: the assignment has another length, or names parts that do not exist.
        """
        _check(graph, part_of, num_parts)
        part_of = part_of.astype(np.min_scalar_type(num_parts - 1), copy=False)
        ntypes = list(graph.num_nodes)
        spans = [slice(graph.first_node[t], graph.first_node[t] + graph.num_nodes[t]) for t in ntypes]
        counts = np.zeros((num_parts, len(ntypes)), np.int64)
        for i, span in enumerate(spans):
            for chunk in _chunks(span):
                counts[:, i] += np.bincount(part_of[chunk], minlength=num_parts)
        ends = counts.cumsum().reshape(counts.shape)
        new_id = np.empty(len(part_of), index_dtype(len(part_of)))
        for i, span in enumerate(spans):
            reached = (ends - counts)[:, i]
            for chunk in _chunks(span):
                order, sizes = by_part(part_of[chunk], num_parts)
                firsts = sizes.cumsum() - sizes
                new_id[chunk][order] = np.repeat(reached - firsts, sizes) + np.arange(len(order))
                reached = reached + sizes
        return cls(part_of, new_id, np.stack([ends - counts, ends], axis=2))

    def bounds(self, part: int) -> tuple[int, int]:
        """The new IDs [start, end) of a part."""
        return int(self.ranges[part, 0, 0]), int(self.ranges[part, -1, 1])


def by_part(parts: Array, num_parts: int) -> tuple[Array, Array]:
    """The order that sorts rows by part and keeps them in order otherwise, (n,), and how many each part has, (P,)."""
    return parts.argsort(kind="stable"), np.bincount(parts, minlength=num_parts)


def _chunks(span: slice) -> Iterator[slice]:
    """Few nodes at a time, as numpy makes several copies of them, in 8 bytes each."""
    for start in range(span.start, span.stop, _ROWS):
        yield slice(start, min(span.stop, start + _ROWS))


def _check(graph: GraphSource, part_of: Array, num_parts: int) -> None:
    if part_of.shape != (graph.total_nodes,) or part_of.dtype.kind not in "iu":
        raise ConfigError(
            f"the assignment has shape {part_of.shape} and type {part_of.dtype}; expected an integer for each of "
            f"{graph.total_nodes} nodes."
        )
    if part_of.size and not 0 <= part_of.min() <= part_of.max() < num_parts:
        node = int(np.flatnonzero((part_of < 0) | (part_of >= num_parts))[0])
        raise ConfigError(f"the assignment puts node {node} into part {part_of[node]}; expected 0 to {num_parts - 1}.")
