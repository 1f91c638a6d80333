"""The methods that assign nodes to parts, by name, and which of them fits into the memory allowed.

Other packages add theirs by entry points of the group `sar.partition_methods`.
"""

import shutil
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import NamedTuple, cast

from sar.errors import ConfigError
from sar.logging_setup import logger
from sar.partition.assign.ldg import ldg
from sar.partition.assign.metis import EDGE_BYTES, metis
from sar.partition.assign.multilevel import ENTRY_BYTES, coarse_entries, multilevel
from sar.partition.assign.random import random
from sar.partition.assign.spring import spring
from sar.partition.assign.task import AssignmentTask, Method
from sar.partition.graph_data import Array

ENTRY_POINTS = "sar.partition_methods"
"""Group of the entry points by which packages add methods."""
_MIB = 2**20


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
    "multilevel": Needs(24 * _MIB, node=96, weight=24, disk=48, coarsens=True),
    "metis": Needs(24 * _MIB, node=64, weight=24, edge=EDGE_BYTES, disk=24),
    "ldg": Needs(24 * _MIB, node=24, weight=12, disk=24),
    "spring": Needs(48 * _MIB, node=48, weight=12),
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
    return METHODS[choice.method](task)


METHODS: dict[str, Method] = {
    "random": random,
    "spring": spring,
    "ldg": ldg,
    "multilevel": multilevel,
    "metis": metis,
    "auto": auto,
}
"""The methods that are there without an entry point, so that `auto` can rely on them."""


def method_named(name: str) -> Method:
    """The method of this name: one of `METHODS`, or an entry point of an installed package.

    Args:
        name: for instance `spring`; names in `METHODS` go before entry points.

    Raises:
        ConfigError: there is no such method, or the package that brings it cannot be imported.
    """
    if name in METHODS:
        return METHODS[name]
    for point in entry_points(group=ENTRY_POINTS, name=name):
        try:
            return cast(Method, point.load())
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"partition method '{name}' is '{point.value}', which cannot be imported: {error}; "
                "repair or remove the package that registers it."
            ) from error
    raise ConfigError(f"there is no partition method '{name}'; expected one of {', '.join(method_names())}.")


def method_names() -> list[str]:
    """The names that `method_named` knows."""
    return list(dict.fromkeys([*METHODS, *sorted(entry_points(group=ENTRY_POINTS).names)]))


def _mib(count: int) -> str:
    return f"{count / _MIB:,.1f} MiB"
