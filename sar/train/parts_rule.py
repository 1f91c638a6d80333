"""How many parts a graph needs, for workers of a given memory.

[Note: how many parts]
For q workers (Huang et al., SDT-GNN, section III-C): q parts where these fit, else the fewest of which one fits.
Where the paper takes two thirds of a worker's memory for computations, `PartsThatFit` plans the largest part from the
counts of an assignment, as `sar plan` does from a directory. Equal parts that read nothing from each other say from
which number on to try, as fewer parts cannot fit; each number that is tried takes an assignment.

Where workers hold one part at a time ([Note: workers of one process]), more than q parts are planned by
`plan_resident`, and the numbers are multiples of q.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from sar.errors import ConfigError
from sar.partition.assign.assigning import Assigned, Choice
from sar.partition.graph_source import GraphSource
from sar.train.counted_graph import CountingGroup, counted_graph
from sar.train.footprint import MOST, PARTS, MemoryPlan, ResidentPlan, mega, of_limit, plan_resident, plan_worker
from sar.train.graph_counts import GraphCounts, count_source, even_share
from sar.train.trial_epoch import MakeModel

_FALL = 0.95
"""To this share of itself memory has to fall with twice as many parts, or no number of them is expected to fit."""

AssignTo = Callable[[int], Assigned]


@dataclass(frozen=True)
class PartsThatFit:
    """Finds the fewest parts, one for each worker at least, of which each fits a worker by its planned footprint."""

    workers: int  # q
    memory: int  # bytes that a worker has
    model: str  # what is trained, in words that say all about it
    make_model: MakeModel = field(repr=False)  # makes it, as in `sar.train.trial_epoch.try_epoch`
    process: int = field(repr=False)  # bytes that code takes
    in_width: int | None = None  # as in `sar.train.graph_counts.count_graph`
    num_classes: int | None = None  # likewise
    resident: bool = False  # whether a worker may hold one part at a time, and the others in a file

    @property
    def _step(self) -> int:
        return self.workers if self.resident else 1

    def __call__(self, graph: GraphSource, assign_to: AssignTo, /) -> Assigned:
        """The assignment, which also says why so many parts; `ConfigError` if no number fits. [Note: how many parts]"""
        _check(self.workers, self.memory)
        step = self._step
        most = max(self.workers, min(graph.total_nodes, MOST) // step * step)
        best, best_resident, tried = None, None, dict[int, MemoryPlan]()
        parts = self._fewest_equal(graph, most)
        fails = parts - step
        while best is None or best.num_parts - fails > step:
            assigned = assign_to(parts)
            part_of, in_width, num_classes = assigned.part_of, self.in_width, self.num_classes
            counts = count_source(graph, part_of, parts, in_width=in_width, num_classes=num_classes)
            in_turns = self._in_turns(parts)
            resident = plan_resident(counts, self.workers, self.make_model, self.process) if in_turns else None
            largest = tried[parts] = self._largest(counts) if resident is None else resident.memory
            if largest.total <= self.memory:
                best, best_resident = assigned, resident
            else:
                fails = parts
                if parts == most or _falls_no_more(tried):
                    raise ConfigError(self._refusal(largest, f"the largest of {parts} parts", tried))
            if best is not None:
                parts = (fails + best.num_parts) // (2 * step) * step
            else:
                estimate = -(-(largest.workers_to_fit(parts, self.memory) or 0) // step) * step
                parts = min(estimate if estimate > parts and len(tried) == 1 else max(estimate, 2 * parts), most)
        return _explained(best, self._reason(best.num_parts, tried, best_resident))

    def _fewest_equal(self, graph: GraphSource, most: int) -> int:
        """The fewest parts, q at least, that would fit if they were equal and read nothing from each other."""
        whole = _count_undivided(graph, self.in_width, self.num_classes)

        def plan_share(parts: int) -> MemoryPlan:
            if self._in_turns(parts):
                pair = plan_resident(even_share(whole, parts, shown=2), 1, self.make_model, self.process)
                return replace(pair, waiting=pair.waiting // pair.each * (parts // self.workers)).memory
            return self._largest(even_share(whole, parts))

        largest, last = self.workers, None
        while (share := plan_share(largest)).total > self.memory:
            if largest == most or (last is not None and last.total <= share.total):
                raise ConfigError(self._refusal(share, f"one of {largest} equal parts", {}))
            last = share if self._in_turns(largest) else None  # of these, more may take more
            largest = min(2 * largest, most)
        numbers = range(self.workers, largest + 1, self._step)
        return numbers[bisect_left(numbers, True, key=lambda parts: plan_share(parts).total <= self.memory)]

    def _in_turns(self, parts: int) -> bool:
        return self.resident and parts > self.workers

    def _largest(self, counts: GraphCounts) -> MemoryPlan:
        """What the largest part takes."""
        plans = (plan_worker(counts, part, self.make_model, self.process).memory for part in _candidates(counts))
        return max(plans, key=lambda memory: memory.total)

    def _reason(self, parts: int, tried: dict[int, MemoryPlan], resident: ResidentPlan | None) -> str:
        if resident is not None:
            many = f"{parts} parts, {resident.each} in turns on each of {self.workers} workers; {resident.in_words()}"
        else:
            faster = ", which is faster than in turns: leave --resident out" if self.resident else ""
            many = _how_many(parts, self.workers) + faster
        largest = f"the largest of {parts} parts takes {_described(tried[parts])}"
        said = [many, f"planned for {self.model}, {of_limit(self.memory)} a worker", largest]
        if parts > self.workers:
            falling = ("data", "structure", "activations", "buffers")
            limit = max(falling, key=lambda what: int(getattr(tried[parts], what)))
            said[-1] += f"; beside code and parameters, {limit} limit most"
            less = parts - self._step
            if less in tried:
                said.append(f"the largest of {less} would take {_described(tried[less])}")
            else:
                said.append(f"{less} parts are too few even if equal and without halo")
        return "\n".join(said)

    def _refusal(self, memory: MemoryPlan, whose: str, tried: dict[int, MemoryPlan]) -> str:
        before = "".join(f"; the largest of {parts} {mega(one.total)} MB" for parts, one in sorted(tried.items())[:-1])
        return (
            f"no number of parts fits {of_limit(self.memory)} a worker: {whose} takes {_described(memory)}{before}. "
            "Allow more memory, or make the model smaller."
        )


@dataclass(frozen=True)
class PartsByReserve:
    """Finds the number of parts from what a worker needs beside graph and features, as SDT-GNN does (section III-C).

    With S bytes of graph and features: q parts where S <= q (M - T), else the least number not below S / (M - T).
    """

    workers: int  # q
    memory: int  # M, bytes that a worker has
    reserve: int  # T, bytes of it for code and computations

    def __call__(self, graph: GraphSource, assign_to: AssignTo, /) -> Assigned:
        """As from `PartsThatFit`; `ConfigError` where nothing is left for graph and features."""
        _check(self.workers, self.memory)
        room = self.memory - self.reserve
        if room <= 0:
            raise ConfigError(
                f"{of_limit(self.reserve)} of a worker's {of_limit(self.memory)} are reserved; expected less than all."
            )
        counts = _count_undivided(graph, 1, 1)
        _, structure = counted_graph(counts, 0, CountingGroup(0, 1))
        size = counts.data_bytes(0) + structure.nbytes
        parts = max(self.workers, -(-size // room))
        said = (
            f"graph and features take {mega(size)} MB, and a worker has {mega(room)} of {mega(self.memory)} MB for them"
        )
        return _explained(assign_to(parts), f"{_how_many(parts, self.workers)}: {said}")


def _check(workers: int, memory: int) -> None:
    if workers < 1 or memory < 1:
        raise ConfigError(f"{workers} workers of {memory} bytes were named; expected at least 1 of each.")


def _count_undivided(graph: GraphSource, in_width: int | None, num_classes: int | None) -> GraphCounts:
    part_of = np.zeros(graph.total_nodes, np.uint8)
    return count_source(graph, part_of, 1, in_width=in_width, num_classes=num_classes)


def _explained(assigned: Assigned, reason: str) -> Assigned:
    method, why = assigned.choice
    return assigned._replace(choice=Choice(method, f"{why}\n{reason}"))


def _how_many(parts: int, workers: int) -> str:
    """What the number means for workers that are there."""
    if parts == workers:
        return f"{parts} parts: {workers} workers hold one each, with all parts in memory at once"
    return (
        f"{parts} parts: a worker has memory for one at a time, so {workers} workers take up to {-(-parts // workers)} "
        f"each in turns; with all parts in memory at once, as sar trains full graphs, it takes {parts} workers"
    )


def _described(memory: MemoryPlan) -> str:
    """The sum, and what it is made of, the largest first."""
    sizes = sorted(((part, int(getattr(memory, part))) for part in PARTS), key=lambda of: -of[1])
    return f"{mega(memory.total)} MB: " + ", ".join(f"{part} {mega(size)}" for part, size in sizes if size)


def _candidates(counts: GraphCounts) -> list[int]:
    """The parts that no other one exceeds in everything: nodes and in-edges by type, and rows read and sent."""
    columns = [[of_part[ntype] for of_part in counts.nodes] for ntype in counts.info.ntypes]
    columns += [[sum(into) for into in relation.edges] for relation in counts.relations]
    halos = sum(np.array(relation.halo) for relation in counts.relations)
    columns.append((np.sum(halos, axis=0) + np.sum(halos, axis=1)).tolist())
    sizes = np.array(columns).T
    chosen: list[int] = []
    for part in np.lexsort(sizes.T)[::-1]:
        if not any((sizes[part] <= sizes[other]).all() for other in chosen):
            chosen.append(int(part))
    return chosen


def _falls_no_more(tried: dict[int, MemoryPlan]) -> bool:
    """Whether so many parts are about as large as half as many."""
    sizes = {parts: memory.total - memory.process - memory.parameters for parts, memory in tried.items()}
    most = max(sizes)
    return any(2 * fewer <= most and sizes[most] > _FALL * sizes[fewer] for fewer in sizes)
