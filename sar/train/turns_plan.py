"""Plans training with one of a process's partitions in memory at a time, and finds how many partitions that takes."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from sar.outofcore.spill import DiskBandwidth
from sar.partition.inspect.text_tables import as_text
from sar.train.footprint import FIRST_EPOCH, MemoryPlan, mega
from sar.train.graph_counts import GraphCounts
from sar.train.trial_epoch import MakeModel
from sar.train.turns_trial import try_turns

WAITING = 1_000_000
"""Bytes that a virtual worker keeps while it waits: tensors too small to leave, and what Python knows of the others."""
SAMPLE = 4
"""Virtual workers of a process that are tried, the largest and the smallest among them; the rest lie between."""
MOST = 1024
"""More parts are not tried, unless there are more workers: the time to plan one part grows with their number."""


@dataclass(frozen=True)
class TurnsPlan:
    """What a process takes that trains its partitions in turns, in bytes; of several, that which has most data.

    parts: p, on all processes.
    in_turns: V, on each.
    process: code.
    tensors: at the peak, of the partition that has the turn.
    written, read: to and from its spill file in an epoch.
    written_in_place, read_in_place: as in `TurnsTrial`.
    """

    parts: int
    in_turns: int
    process: int
    tensors: int
    written: int
    read: int
    written_in_place: int
    read_in_place: int

    def as_memory(self) -> MemoryPlan:
        """The process at the peak: all tensors of a turn as activations, and what waits as structure."""
        return MemoryPlan(self.process + FIRST_EPOCH, 0, self.in_turns * WAITING, self.tensors, 0, 0, before=0)

    @property
    def memory(self) -> int:
        """Resident at the peak, without pages of the file that the system keeps while nobody else needs memory."""
        return self.as_memory().total

    @property
    def all_written(self) -> int:
        return self.written + self.written_in_place

    @property
    def all_read(self) -> int:
        return self.read + self.read_in_place

    def on_disk(self, disk: DiskBandwidth) -> str:
        """What the disk has to do, in words."""
        return (
            f"an epoch writes up to {mega(self.all_written)} MB and reads up to {mega(self.all_read)} MB on each; at "
            f"{_speeds(disk)} that is {self.disk_seconds(disk):.1f} s of disk at most"
        )

    def disk_seconds(self, disk: DiskBandwidth) -> float:
        """Of an epoch at most: where the page cache keeps nothing from one turn to the next."""
        return self.all_written / disk.write + self.all_read / disk.read


def plan_turns(counts: GraphCounts, processes: int, make_model: MakeModel, process: int) -> TurnsPlan:
    """Plan p = `counts.num_workers` partitions on W processes.

    Args:
        counts: of the p partitions; p is a multiple of W.
        processes: W.
        make_model: as in `try_epoch`.
        process: bytes that code takes.

    Raises:
        ConfigError: the model cannot be run without values.
    """
    size = counts.num_workers // processes
    groups = [range(first, first + size) for first in range(0, counts.num_workers, size)]
    workers = sorted(max(groups, key=lambda group: sum(map(counts.data_bytes, group))), key=counts.data_bytes)
    tried = {workers[number * (size - 1) // (SAMPLE - 1)] for number in range(SAMPLE)}
    trials = [try_turns(counts, worker, size, make_model) for worker in tried]
    sums = [
        sum(getattr(trial, name) for trial in trials) * size // len(trials)
        for name in ("written", "read", "written_in_place", "read_in_place")
    ]
    return TurnsPlan(counts.num_workers, size, process, max(trial.peak for trial in trials), *sums)


def _speeds(disk: DiskBandwidth) -> str:
    return f"{mega(disk.write)} MB/s written and {mega(disk.read)} MB/s read"


@dataclass(frozen=True)
class TurnsSearch:
    """Numbers of partitions for W processes of so much memory, the fewest first.

    processes: W.
    memory: bytes that a process has; None where that is not said.
    together: bytes of a process that has all of its partitions in memory, W in all.
    plans: what was planned.
    disk: that of the spill file.
    """

    processes: int
    memory: int | None
    together: int
    plans: list[TurnsPlan]
    disk: DiskBandwidth

    @property
    def fastest(self) -> int | None:
        """The number of partitions to take; None where none fits.

        Fewer partitions write and read less, so the fewest that fit are the fastest.
        """
        if self.memory is None or self.together <= self.memory:
            return self.processes
        return next((plan.parts for plan in self.plans if plan.memory <= self.memory), None)

    def summary(self) -> dict[str, Any]:
        """Everything here in types that JSON has."""
        plans = [
            asdict(plan) | {"memory": plan.memory, "disk_seconds": plan.disk_seconds(self.disk)} for plan in self.plans
        ]
        return {"together": self.together, "in_turns": plans, "disk": self.disk._asdict(), "fastest": self.fastest}

    def as_text(self) -> str:
        """A table for people, and what to do."""
        head = "partitions", "MB at peak", "MB written", "MB read", "s of disk at most"
        rows: list[tuple[str, ...]] = [head, (str(self.processes), mega(self.together), "0.0", "0.0", "0.0")]
        for plan in self.plans:
            sizes = map(mega, (plan.memory, plan.all_written, plan.all_read))
            rows.append((str(plan.parts), *sizes, f"{plan.disk_seconds(self.disk):.1f}"))
        who = "one process" if self.processes == 1 else f"each of {self.processes} processes"
        title = f"one partition in memory at a time, an epoch of {who}, with a disk of {_speeds(self.disk)}"
        return f"{title}\n{as_text(rows, left=1)}\n\n{self._advice()}"

    def _advice(self) -> str:
        if self.memory is None:
            return "say --memory-per-worker SIZE to hear which number is the fastest that fits."
        fits = f"{mega(self.memory)} MB"
        if self.fastest == self.processes:
            return f"all partitions fit {fits} a process at once, which is faster: leave --resident and --spill out."
        if self.fastest is None:
            return f"no number of partitions up to {self.plans[-1].parts} fits {fits} a process."
        return f"{self.fastest} partitions are the fewest that fit {fits} a process, and so the fastest."


def search_turns(
    count: Callable[[int], GraphCounts],
    processes: int,
    memory: int | None,
    together: int,
    make_model: MakeModel,
    process: int,
    disk: DiskBandwidth,
) -> TurnsSearch:
    """Find the fewest partitions of which one at a time fits, multiples of W, by doubling and then halving.

    Args:
        count: counts the graph in so many partitions.
        processes, memory, together, disk: as in `TurnsSearch`. Without `memory`, three numbers are planned.
        make_model, process: as in `plan_turns`.
    """
    plans: dict[int, TurnsPlan] = {}

    def fits(rounds: int) -> bool:
        plans[rounds] = plan_turns(count(rounds * processes), processes, make_model, process)
        return memory is not None and plans[rounds].memory <= memory

    rounds = 2
    while not fits(rounds) and 2 * rounds * processes <= (MOST if memory is not None else 8 * processes):
        fewer = plans.get(rounds // 2)
        if memory is not None and fewer is not None and fewer.memory <= plans[rounds].memory:
            break  # what waits outgrows what is saved
        rounds *= 2
    fails = rounds // 2
    while memory is not None and plans[rounds].memory <= memory and rounds - fails > 1:
        middle = (fails + rounds) // 2
        fails, rounds = (fails, middle) if fits(middle) else (middle, rounds)
    return TurnsSearch(processes, memory, together, [plans[key] for key in sorted(plans)], disk)
