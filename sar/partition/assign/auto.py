"""The method with the best cut that fits into the memory allowed."""

import shutil
from collections.abc import Callable
from typing import NamedTuple

from sar.errors import ConfigError
from sar.logging_setup import logger
from sar.partition.assign.assignment import AssignmentTask
from sar.partition.assign.methods import method_named
from sar.partition.assign.multilevel import ENTRY_BYTES, coarse_entries
from sar.partition.graph_data import Array

MIB = 2**20


class Needs(NamedTuple):
    """What a method is expected to take at its peak, in bytes.

    memory: beyond what is there when it starts.
    disk: in the task's scratch directory.
    """

    memory: int
    disk: int


Estimate = Callable[[AssignmentTask], Needs]


def _multilevel(task: AssignmentTask) -> Needs:
    coarse = ENTRY_BYTES * min(2 * task.graph.total_edges, coarse_entries(task.memory))
    return Needs(24 * MIB + _nodes(task, 96, 24) + coarse, 48 * task.graph.total_edges)


def _metis(task: AssignmentTask) -> Needs:
    return Needs(24 * MIB + _nodes(task, 64, 24) + 170 * task.graph.total_edges, 24 * task.graph.total_edges)


def _ldg(task: AssignmentTask) -> Needs:
    return Needs(24 * MIB + _nodes(task, 24, 12), 24 * task.graph.total_edges)


def _spring(task: AssignmentTask) -> Needs:
    return Needs(48 * MIB + _nodes(task, 48, 12), 0)


def _random(task: AssignmentTask) -> Needs:
    return Needs(_nodes(task, 16, 12), 0)


def _nodes(task: AssignmentTask, each: int, each_weight: int) -> int:
    return task.graph.total_nodes * (each + each_weight * len(task.weights))


# By the cut to expect on graphs with communities, the smallest first. Measured with 16 edges a node and one weight:
# METIS grows by 140 to 170 bytes an edge.
ESTIMATES: dict[str, Estimate] = {
    "multilevel": _multilevel,
    "metis": _metis,
    "ldg": _ldg,
    "spring": _spring,
    "random": _random,
}


class Choice(NamedTuple):
    """A method's name, and in words why it was chosen."""

    name: str
    why: str


def choose(task: AssignmentTask) -> Choice:
    """The method with the smallest cut to expect, of those that `task.memory` and the free disk space allow.

    Raises:
        ConfigError: they do not even allow random parts.
    """
    free = shutil.disk_usage(task.scratch).free
    passed = []
    for name, estimate in ESTIMATES.items():
        needs = estimate(task)
        if task.memory is not None and needs.memory > task.memory:
            passed.append(f"{name} needs about {_mib(needs.memory)}")
        elif needs.disk > free:
            passed.append(f"{name} needs about {_mib(needs.disk)} of disk, and {_mib(free)} are free")
        else:
            allowed = "no limit was set" if task.memory is None else f"{_mib(task.memory)} are allowed"
            why = f"the smallest cut to expect; it needs about {_mib(needs.memory)}, {allowed}"
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
    return method_named(choice.name)(task)


def _mib(count: int) -> str:
    return f"{count / MIB:,.1f} MiB"
