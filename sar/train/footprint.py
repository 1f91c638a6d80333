"""Predicts what training a model on a partition directory takes: bytes sent, and memory of every worker.

Where each worker has a partition in memory, and where it has one of several at a time and the others in a file.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from sar.comm.statistics import BACKWARD
from sar.partition.inspect.text_tables import as_text
from sar.train.graph_counts import GraphCounts
from sar.train.trial_epoch import MakeModel, TrialEpoch, try_epoch

FIRST_EPOCH = 12 * 10**6  # bytes that the first epoch brings beside tensors: code above all, and holes in the heap
PARTS = ("process", "data", "structure", "activations", "parameters", "buffers")  # what a `MemoryPlan` adds up
WAITING = 1_000_000
"""Bytes that a partition keeps in memory while it waits: small tensors, and what Python knows of the others."""
SAMPLE = 4  # partitions of a process that are tried, the largest and the smallest among them; the rest lie between
MOST = 1024  # more parts are not tried, unless there are more workers: the time to plan one grows with their number


@dataclass
class LayerTraffic:
    """Bytes that a worker sends for one distributed call of a model in an epoch: messages with their alignment."""

    call: str  # what it computes
    forward: int  # its rows to their readers
    backward: int = 0  # gradients of the rows of others, and its rows again where the backward reads them


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes at the peak of training."""

    process: int  # code
    data: int  # features, labels, masks and IDs
    structure: int  # the graph, and what it makes for the backward and for tiles
    activations: int  # what layers keep and compute with, own nodes only
    parameters: int  # with gradients and the optimiser's state
    buffers: int  # of messages, at that moment
    before: int  # what of all this is there just before the first epoch

    @property
    def total(self) -> int:
        """Resident memory at the peak."""
        return self.process + self.data + self.structure + self.activations + self.parameters + self.buffers

    @property
    def above_baseline(self) -> int:
        """The peak above the level just before the first epoch, which is what benchmarks measure."""
        return self.total - self.before

    @property
    def fixed(self) -> int:
        """What does not fall with the number of workers."""
        return self.process + self.parameters + self.buffers

    def workers_to_fit(self, workers: int, memory: int) -> int | None:
        """Where this is one of so many workers, the number of which one takes `memory` bytes, by proportion."""
        room = memory - self.fixed
        return -(-(self.total - self.fixed) * workers // room) if room > 0 else None


@dataclass(frozen=True)
class WorkerPlan:
    """What one worker sends in an epoch with one step of the optimiser, and its memory at the peak, in bytes."""

    bytes_sent: int  # all together and with the agreements before each call, as `sar.comm.statistics()` counts it
    layers: list[LayerTraffic]
    parameters_sent: int  # gradients of the parameters in `gather_grads`
    memory: MemoryPlan


@dataclass(frozen=True)
class TrainingPlan:
    """What training takes, worker by worker."""

    workers: list[WorkerPlan]

    def fewest_workers(self, memory: int) -> int | None:
        """The least number of workers of which each needs at most `memory` bytes; None where no number does.

        By proportion: balance stays, and each reads as large a share of the others' nodes.
        """
        found = [worker.memory.workers_to_fit(len(self.workers), memory) for worker in self.workers]
        fewest = [workers for workers in found if workers is not None]
        return max(1, *fewest) if len(fewest) == len(found) else None

    def summary(self) -> dict[str, Any]:
        """Everything here in types that JSON has."""
        found = asdict(self)
        for shown, worker in zip(found["workers"], self.workers, strict=True):
            shown["memory"] |= {"above_baseline": worker.memory.above_baseline, "total": worker.memory.total}
        return found

    def as_text(self) -> str:
        """Tables for people, in MB of a million bytes."""
        calls = self.workers[0].layers
        numbers = [f"call {k}" for k in range(len(calls))]
        sent: list[tuple[str, ...]] = [("worker", *numbers, "parameters", "MB an epoch")]
        memory: list[tuple[str, ...]] = [("worker", *PARTS, "MB at peak", "above baseline")]
        for rank, worker in enumerate(self.workers):
            layers = [layer.forward + layer.backward for layer in worker.layers]
            sent.append((str(rank), *map(mega, (*layers, worker.parameters_sent, worker.bytes_sent))))
            parts = [getattr(worker.memory, part) for part in PARTS]
            memory.append((str(rank), *map(mega, (*parts, worker.memory.total, worker.memory.above_baseline))))
        blocks = [
            "\n".join(f"call {k}: {layer.call}" for k, layer in enumerate(calls)),
            f"sent, MB an epoch\n{as_text(sent, left=1)}",
            "resident memory, as ps shows it, code in files included; MB at the peak of training\n"
            + as_text(memory, left=1),
        ]
        return "\n\n".join(block for block in blocks if block)

    def advice(self, memory: int) -> str:
        """Whether `memory` bytes for each worker are enough, and how many workers would be."""
        largest = max(worker.memory.total for worker in self.workers)
        verdict = f"{len(self.workers)} workers {'fit' if largest <= memory else 'do not fit'} {of_limit(memory)} each"
        fewest = self.fewest_workers(memory)
        if fewest is None:
            return f"{verdict}; nor would any number of workers, as code and buffers alone take more."
        return f"{verdict}; by the balance and halo of these parts, {fewest} is the fewest that would."


@dataclass(frozen=True)
class ResidentPlan:
    """What a process takes that trains V partitions with one in memory at a time, in bytes.

    Its shares are counted in the epoch of [Note: counted turns]. Where there are several processes, this is the one
    with most data.
    """

    parts: int  # p, on all processes
    each: int  # V, on each
    process: int  # code
    waiting: int  # what the V partitions keep in memory while they wait
    partition: int  # what the one that computes makes between two distributed calls and has at once
    buffers: int  # of messages between processes
    features: int  # in the file of tensors; read from there where they are used
    structure: int  # of the graph, likewise
    written: int  # to the file in an epoch: activations, gradients and the optimiser's state
    read: int  # of these, from the file in an epoch
    rows: int  # that partitions read of each other in an epoch, and gradients that return

    @property
    def memory(self) -> MemoryPlan:
        """At the peak, without pages of the file that the system keeps while nobody else needs memory."""
        return MemoryPlan(self.process, 0, self.waiting, self.partition, 0, self.buffers, before=0)

    def in_words(self) -> str:
        """What goes to the file and comes from it."""
        return (
            f"on each, the file holds {mega(self.features)} MB of features and {mega(self.structure)} MB of edges; an "
            f"epoch writes {mega(self.written)} MB and reads {mega(self.read)} MB and, of rows of other partitions, "
            f"{mega(self.rows)} MB"
        )


def plan_resident(counts: GraphCounts, processes: int, make_model: MakeModel, process: int) -> ResidentPlan:
    """Plan `counts.num_workers` partitions on processes that each have as many, and one in memory at a time.

    Code takes `process` bytes. Raises as `try_epoch`.
    """
    each = counts.num_workers // processes
    groups = [range(first, first + each) for first in range(0, counts.num_workers, each)]
    parts = sorted(max(groups, key=lambda group: sum(map(counts.data_bytes, group))), key=counts.data_bytes)
    sample = {parts[number * (each - 1) // (SAMPLE - 1)] for number in range(SAMPLE)}
    trials = [try_epoch(counts, part, make_model, resident=True) for part in sample]

    def of_all(share: Callable[[TrialEpoch], int]) -> int:
        return sum(map(share, trials)) * each // len(trials)

    return ResidentPlan(
        parts=counts.num_workers,
        each=each,
        process=process + FIRST_EPOCH,
        waiting=each * WAITING,
        partition=max(trial.turns.peak for trial in trials),
        buffers=max(trial.buffers for trial in trials) if processes > 1 else 0,
        features=sum(map(counts.data_bytes, parts)),
        structure=of_all(lambda trial: trial.structure),
        written=of_all(lambda trial: trial.turns.written),
        read=of_all(lambda trial: trial.turns.read),
        rows=of_all(lambda trial: sum(call.messages for call in trial.calls)),
    )


@dataclass(frozen=True)
class ResidentSearch:
    """Numbers of partitions for W processes, each with one of its own in memory at a time."""

    processes: int  # W
    memory: int | None  # bytes that a process has; None where that is not said
    together: int  # bytes of a process that has all of its partitions in memory, W in all
    plans: list[ResidentPlan]  # what was planned, the fewest partitions first

    @property
    def fewest(self) -> int | None:
        """The fewest partitions that fit, which read and write the least; None where no number does."""
        if self.memory is None or self.together <= self.memory:
            return self.processes
        return next((plan.parts for plan in self.plans if plan.memory.total <= self.memory), None)

    def summary(self) -> dict[str, Any]:
        """Everything here in types that JSON has."""
        plans = [asdict(plan) | {"memory": plan.memory.total} for plan in self.plans]
        return {"together": self.together, "plans": plans, "fewest": self.fewest}

    def as_text(self) -> str:
        """A table for people, and what to do."""
        shares = "features", "structure", "written", "read", "rows"
        rows: list[tuple[str, ...]] = [("partitions", "in memory at peak", *shares)]
        rows.append((str(self.processes), mega(self.together), *["0.0"] * len(shares)))
        for plan in self.plans:
            sizes = (plan.memory.total, *(getattr(plan, share) for share in shares))
            rows.append((str(plan.parts), *map(mega, sizes)))
        who = "one process" if self.processes == 1 else f"each of {self.processes} processes"
        title = f"one partition in memory at a time, the others in a file; MB, and MB an epoch, of {who}"
        cached = "in memory: resident, without pages of the file, which the system also keeps while memory is free"
        return f"{title}\n{cached}\n{as_text(rows, left=1)}\n\n{self._advice()}"

    def _advice(self) -> str:
        if self.memory is None:
            return "say --memory-per-worker SIZE to hear which number is the fewest that fits."
        fits = of_limit(self.memory)
        if self.fewest == self.processes:
            return f"all partitions fit {fits} a process at once, which is faster: leave --resident out."
        if self.fewest is None:
            return f"no number of partitions up to {self.plans[-1].parts} fits {fits} a process."
        return f"{self.fewest} partitions are the fewest that fit {fits} a process, and so the fastest."


def search_resident(
    count: Callable[[int], GraphCounts],
    processes: int,
    memory: int | None,
    together: int,
    make_model: MakeModel,
    process: int,
) -> ResidentSearch:
    """Find the fewest partitions of which one at a time fits, multiples of W, by doubling and then halving.

    `count` counts the graph in so many partitions. `processes`, `memory` and `together` are those of `ResidentSearch`;
    without `memory`, three numbers are planned. The rest is as in `plan_resident`.
    """
    plans: dict[int, ResidentPlan] = {}

    def fits(each: int) -> bool:
        plans[each] = plan_resident(count(each * processes), processes, make_model, process)
        return memory is not None and plans[each].memory.total <= memory

    most = MOST if memory is not None else 8 * processes
    each = 2
    while not (found := fits(each)) and 2 * each * processes <= most:
        if memory is not None and each > 2 and plans[each // 2].memory.total <= plans[each].memory.total:
            break  # what waits outgrows what is saved
        each *= 2
    if found:
        numbers = range(each // 2 + 1, each)
        bisect_left(numbers, True, key=fits)
    return ResidentSearch(processes, memory, together, [plans[key] for key in sorted(plans)])


def plan_training(counts: GraphCounts, make_model: MakeModel, process: int) -> TrainingPlan:
    """Predict bytes and memory of full-graph training with `Config` as it is; raises as `try_epoch`.

    Bytes are exact for a training loop with one `gather_grads` an epoch. Memory is within 15 % where a worker's tensors
    are most of it: see [Note: what is assumed] in `trial_epoch.py`. Code takes `process` bytes before the first epoch.
    """
    return TrainingPlan([plan_worker(counts, worker, make_model, process) for worker in range(counts.num_workers)])


def plan_worker(counts: GraphCounts, worker: int, make_model: MakeModel, process: int) -> WorkerPlan:
    """What one worker takes, as in `plan_training`."""
    trial = try_epoch(counts, worker, make_model)
    layers: list[LayerTraffic] = []
    parameters = 0
    for traffic in trial.calls:
        call = traffic.call.removeprefix(BACKWARD).partition(";")[0]  # without graph and settings
        if call.startswith("gather_grads"):
            parameters += traffic.messages
        elif traffic.call.startswith(BACKWARD):
            # Autograd goes back from the last call, so of calls that are alike the last is the one.
            waiting = (layer for layer in reversed(layers) if layer.call == call and not layer.backward)
            next(waiting).backward = traffic.messages
        else:
            layers.append(LayerTraffic(call, traffic.messages))
    return WorkerPlan(trial.sent, layers, parameters, _memory(trial, counts.data_bytes(worker), process))


def _memory(trial: TrialEpoch, data: int, process: int) -> MemoryPlan:
    parameters = 4 * trial.parameters  # themselves, gradients, and two moments of Adam
    structure_made = trial.structure - trial.structure_before
    return MemoryPlan(
        process=process + FIRST_EPOCH,
        data=data,
        structure=trial.structure,
        activations=max(0, trial.above_baseline - structure_made - (parameters - trial.parameters) - trial.buffers),
        parameters=parameters,
        buffers=trial.buffers,
        before=process + data + trial.structure_before + trial.parameters,
    )


def mega(count: float) -> str:
    """Millions of bytes."""
    return f"{count / 1e6:,.1f}"


def of_limit(memory: int) -> str:
    """A limit in MB, as in the tables, and as it was named where that was in powers of 1024."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if memory % size == 0:
            return f"{memory // size} {unit} ({mega(memory)} MB)"
    return f"{mega(memory)} MB"
