"""The method with the best cut that fits into the memory allowed."""

import shutil
from dataclasses import dataclass
from typing import NamedTuple

from sar.errors import ConfigError
from sar.logging_setup import logger
from sar.partition.assign.assignment import AssignmentTask
from sar.partition.assign.methods import method_named
from sar.partition.assign.metis import EDGE_BYTES
from sar.partition.assign.multilevel import ENTRY_BYTES, coarse_entries
from sar.partition.graph_data import Array

MIB = 2**20


@dataclass(frozen=True)
class Needs:
    """What a method is expected to take at its peak, in bytes.

    base, node, weight, edge: memory beyond what is there when it starts: in any case, for each node, for each weight of
        a node, and for each edge.
    disk: in the task's scratch directory, for each edge.
    coarsens: it takes memory for as many neighbours as METIS is given at most, and no more.
    """

    base: int
    node: int
    weight: int
    edge: int = 0
    disk: int = 0
    coarsens: bool = False

    def memory(self, task: AssignmentTask) -> int:
        """Of a task."""
        of_nodes = task.graph.total_nodes * (self.node + self.weight * len(task.weights))
        entries = min(2 * task.graph.total_edges, coarse_entries(task.memory)) if self.coarsens else 0
        return self.base + of_nodes + self.edge * task.graph.total_edges + ENTRY_BYTES * entries


# By the cut to expect on graphs with communities, the smallest first.
NEEDS = {
    "multilevel": Needs(24 * MIB, node=96, weight=24, disk=48, coarsens=True),
    "metis": Needs(24 * MIB, node=64, weight=24, edge=EDGE_BYTES, disk=24),
    "ldg": Needs(24 * MIB, node=24, weight=12, disk=24),
    "spring": Needs(48 * MIB, node=48, weight=12),
    "random": Needs(0, node=16, weight=12),
}


class Choice(NamedTuple):
    """A method's name, and a sentence on why it was chosen."""

    method: str
    why: str


def choose(task: AssignmentTask) -> Choice:
    """The method with the smallest cut to expect, of those that `task.memory` and the free disk space allow.

    Raises:
        ConfigError: they do not even allow random parts.
    """
    free = shutil.disk_usage(task.scratch).free
    passed = []
    for name, needs in NEEDS.items():
        memory = needs.memory(task)
        disk = needs.disk * task.graph.total_edges
        if task.memory is not None and memory > task.memory:
            passed.append(f"{name} needs about {_mib(memory)}")
        elif disk > free:
            passed.append(f"{name} needs about {_mib(disk)} of disk, and {_mib(free)} are free")
        else:
            allowed = "no limit was set" if task.memory is None else f"{_mib(task.memory)} are allowed"
            why = f"the smallest cut to expect; it needs about {_mib(memory)}, {allowed}"
            return Choice(name, "; ".join([why, *passed]))
    raise ConfigError(
        f"{_mib(task.memory or 0)} are too little to divide {task.graph.total_nodes} nodes by any method: "
        f"{'; '.join(passed)}. Allow more memory."
    )


def auto(task: AssignmentTask) -> Array:
    """Take the method that `choose` names, and log which and why.

    Raises:
        ConfigError: they do not even allow random parts.
    """
    choice = choose(task)
    logger.info("method auto takes '%s': %s", *choice)
    return method_named(choice.method)(task)


def _mib(count: int) -> str:
    return f"{count / MIB:,.1f} MiB"
