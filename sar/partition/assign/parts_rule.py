"""The number of parts for workers of a given memory, by the rule of SDT-GNN (Huang et al., section III-C)."""

from dataclasses import dataclass
from math import prod

from sar.errors import ConfigError
from sar.partition.graph_source import GraphSource
from sar.partition.inspect.text_tables import mega, of_limit

_NODE_BYTES = 60  # IDs here and in the input, type, degrees, and its place in the list of destinations
_EDGE_BYTES = 20  # IDs here and in the input, and its source


@dataclass(frozen=True)
class PartsByMemory:
    """Finds the number of parts: with S bytes of graph and features, the least number not below S / (M - T).

    Each of the q workers gets one part at least.
    """

    workers: int  # q
    memory: int  # M, bytes that a worker has
    reserve: int  # T, bytes of it for code and computations

    def __call__(self, graph: GraphSource) -> tuple[int, str]:
        """The number of parts for a graph, and the reason for it.

        Raises:
            ConfigError: no memory is left for graph and features.
        """
        if self.workers < 1 or self.memory < 1:
            raise ConfigError(f"{self.workers} workers of {self.memory} bytes were named; expected at least 1 of each.")
        room = self.memory - self.reserve
        if room <= 0:
            raise ConfigError(
                f"{of_limit(self.reserve)} of a worker's {of_limit(self.memory)} are reserved; expected less than all."
            )
        fields = (*graph.node_data.values(), *graph.edge_data.values())
        size = sum(prod(column.shape) * column.dtype.itemsize for columns in fields for column in columns.values())
        size += _NODE_BYTES * graph.total_nodes + _EDGE_BYTES * graph.total_edges
        parts = max(self.workers, -(-size // room))
        if parts == self.workers:
            meaning = f"{parts} parts: {parts} workers hold one each, with all parts in memory at once"
        else:
            meaning = (
                f"{parts} parts: a worker has memory for one at a time, so {self.workers} workers take up to "
                f"{-(-parts // self.workers)} each in turns (sar launch --resident 1); with all parts in memory at "
                f"once, it takes {parts} workers"
            )
        return parts, (
            f"{meaning}: graph and features take {mega(size)} MB, and a worker has {mega(room)} of "
            f"{mega(self.memory)} MB for them"
        )
