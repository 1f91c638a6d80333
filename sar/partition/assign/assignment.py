"""What a partition method is given, and what it returns.

A method is a function from an `AssignmentTask` to the part of every node, (N,) integers from 0 to P - 1. It reads the
edges as a stream, as often as it likes, and holds O(nodes) memory. Equal tasks give equal assignments. No part is to be
above `task.constraints()`: most methods end with `rebalance(task, parts)`, which moves nodes until that is so.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sar.partition.assign.balance import Constraints, balance_constraints
from sar.partition.graph_data import Array
from sar.partition.graph_source import GraphSource, Progress

VOLUME_BOUND = 0.5
"""Of `spring`, unless another is asked for."""


@dataclass(frozen=True)
class AssignmentTask:
    """What a method is asked for.

    graph: edges to read by `graph.chunks()`, in which the nodes of all types have consecutive numbers, type after type.
    num_parts: P.
    scratch: an empty directory for files that the method needs; it is removed afterwards.
    seed: of every random choice.
    weights: what to balance beside the number of nodes: (N,) non-negative numbers each, by name
        (for instance `train_mask`, or `in_edges`).
    imbalance: how much larger than the mean a part may be, by number of nodes and by each of the weights: 0.05 is 5 %.
    memory: bytes that the method may use beyond what is there when it starts; None: no limit.
    progress: called now and then with what is being done and the share of it that is done, 0 to 1.
    volume_bound: of `spring`: above this sum of degrees a cluster takes no more nodes; times the mean sum of a part.
    """

    graph: GraphSource
    num_parts: int
    scratch: Path
    seed: int = 0
    weights: Mapping[str, Array] = field(default_factory=dict)
    imbalance: float = 0.05
    memory: int | None = None
    progress: Progress = lambda doing, share: None
    volume_bound: float = VOLUME_BOUND

    def constraints(self) -> Constraints:
        """What parts may hold.

        Raises:
            ConfigError: a weight has another length than there are nodes, or is negative or not finite.
        """
        return balance_constraints(self.graph.total_nodes, self.num_parts, self.weights, self.imbalance)


Method = Callable[[AssignmentTask], Array]
